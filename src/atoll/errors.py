"""
Every error that crosses a package boundary of Atoll, in three families.

The caller can fix a `RequestError`. A `TemporaryError` goes away without the caller's help, so the
same call may be repeated. A `PermanentError` is recorded with its cause. The `code` is stable and
part of the API; only clients compare it. Code inside Atoll that tells errors apart does so by their
classes. The message is for the person who can act on it. HTTP status codes are not known here:
`api/rest/problems.py` maps errors to them.
"""

from __future__ import annotations

from typing import Any


class AtollError(Exception):
    """
    The root of the families; `code` is stable, `details` are extra members of the problem document.
    """

    code = "error"

    def __init__(self, message: str, *, code: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details
        if code is not None:
            self.code = code


class RequestError(AtollError):
    """The request cannot be served; repeating it unchanged gives the same answer."""

    code = "bad_request"


class InvalidRequest(RequestError):
    """A field has a value that is not allowed."""

    code = "invalid_request"


class NotFound(RequestError):
    code = "not_found"


class Conflict(RequestError):
    """The state of the resource does not allow this, or it was changed concurrently."""

    code = "conflict"


class VersionConflict(Conflict):
    """The record was changed or removed since it was read; raised by stores alone."""


class AlreadyExists(Conflict):
    """Another record has this id; raised by stores alone."""


class InstanceTaken(Conflict):
    """The instance is gone, or belongs to another session; raised by stores alone."""


class Unauthenticated(RequestError):
    code = "unauthenticated"


class Forbidden(RequestError):
    code = "forbidden"


class TooLarge(RequestError):
    code = "too_large"


class SessionEnded(Conflict):
    """The session exists no more, or its record is only kept for a while."""

    code = "session_ended"


class SessionNotRunning(Conflict):
    """The session is stopped, paused or archived, and the request may not start it."""

    code = "session_not_running"


class WorkspaceLost(NotFound):
    """The node does not have the workspace that the session's record names."""

    code = "workspace_lost"


class CheckpointNotFound(NotFound):
    code = "checkpoint_not_found"


class TemporaryError(AtollError):
    """Nothing was done, or a retry finishes what was begun; `retry_after` is in seconds."""

    code = "unavailable"

    def __init__(
        self, message: str, *, code: str | None = None, retry_after: float = 1.0, **details: Any
    ) -> None:
        super().__init__(message, code=code, **details)
        self.retry_after = retry_after


class PermanentError(AtollError):
    """The work ended without a result and a retry would not help; `cause` is recorded with it."""

    code = "failed"

    def __init__(
        self, message: str, *, code: str | None = None, cause: str = "driver", **details: Any
    ) -> None:
        super().__init__(message, code=code, **details)
        self.cause = cause


class BackendUnavailable(TemporaryError):
    """
    A database, Redis or the blob store does not answer, or a lease that it held was lost. Accepted
    work waits until it is back.
    """


class DatabaseUnavailable(BackendUnavailable):
    code = "database_unavailable"


class CoordinationUnavailable(BackendUnavailable):
    code = "coordination_unavailable"


class BlobsUnavailable(BackendUnavailable):
    code = "blobs_unavailable"


class SpoolFull(BackendUnavailable):
    """The blob store does not answer, and no more data can wait for it on this node's disk."""

    code = "spool_full"


class LeaseLost(BackendUnavailable):
    """Another replica may hold the lease now; the work under it was cancelled."""

    code = "lease_lost"


class PresenceLost(LeaseLost):
    """The heartbeats of this replica were late, and other replicas counted it as lost."""


class NodeUnreachable(TemporaryError):
    """The session is on a node that this replica cannot reach."""

    code = "node_not_reached"


class NodeFull(TemporaryError):
    """The node has no room for another instance, or its disk is full."""

    code = "node_full"


class InstanceNotStarted(TemporaryError):
    code = "instance_not_started"


class InstanceNotObserved(TemporaryError):
    """The driver cannot determine the instance's state, for example while an engine is away."""

    code = "instance_not_observed"


class SessionNotReady(TemporaryError):
    """The session has no instance at the moment, and making one failed."""

    code = "session_not_ready"


class DependencyFailed(PermanentError):
    """Python packages could not be installed."""

    code = "dependency_failed"


class CheckpointDamaged(PermanentError):
    """The blob store has lost or changed a part of the checkpoint."""

    code = "checkpoint_damaged"
