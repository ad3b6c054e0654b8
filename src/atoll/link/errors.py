"""What can go wrong between the control plane and an executor."""

from __future__ import annotations

from atoll.errors import InvalidRequest, TemporaryError


class LinkLost(TemporaryError):
    """The connection is gone; the request may or may not have been done."""

    code = "link_lost"


class ProtocolViolation(LinkLost):
    """
    An executor sent what no executor of ours sends. The connection is closed, and the instance is
    of no more use: its interpreter, which a template's image brings, is not to be trusted.
    """

    code = "protocol_violation"


class LinkCrowded(TemporaryError):
    """More is under way at once than an executor takes, and nothing was sent."""

    code = "session_crowded"


class ExecutorError(InvalidRequest):
    """The executor refused a request; `code` is its own."""
