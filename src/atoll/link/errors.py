"""
Errors of a link and refusals by an executor.

`refusal` makes the exception for an ERROR frame; it is the only place that compares the executor's
codes. A refusal of a file or context operation belongs to the family that clients get it as, so
services let it pass unchanged.
"""

from __future__ import annotations

from atoll.errors import (
    AtollError,
    Conflict,
    InvalidRequest,
    NotFound,
    TemporaryError,
    TooLarge,
)


class LinkLost(TemporaryError):
    """The connection is gone; the request may or may not have been done."""

    code = "link_lost"


class ProtocolViolation(LinkLost):
    """
    The executor sent something that the protocol does not allow. The connection is closed and the
    instance is discarded: its interpreter comes with the template's image and cannot be trusted.
    """

    code = "protocol_violation"


class LinkSaturated(TemporaryError):
    """The executor has as many requests as it accepts at once; nothing was sent."""

    code = "session_crowded"


class ExecutorError(AtollError):
    """The executor refused a request. The root of all refusals; `code` is the executor's."""


class RequestRefused(ExecutorError, InvalidRequest):
    """A refusal that no caller tells apart from others."""


# Runs


class RunAcknowledged(RequestRefused):
    """The run has ended and its result was acknowledged."""


class SessionBusy(RequestRefused):
    """As many executions are active as the request allows at once."""

    @property
    def execution_id(self) -> str:
        """The active execution, which the executor sends as the message."""
        return self.message


class StaleSession(RequestRefused):
    """The executor knows a later version of the session than the request."""


class ExecutorShuttingDown(RequestRefused):
    """The executor is shutting down; the run was not started."""


class RunNotActive(RequestRefused):
    """The executor does not know the run, or the run is ending."""


class StdinClosed(RequestRefused):
    """The run's standard input was closed."""


class QueueFull(RequestRefused):
    """The run has not read the messages that it received before."""


class StdinFull(QueueFull):
    """The run has not read its standard input."""


class ZygoteReplaced(RequestRefused):
    """The zygote that the request names has ended; another one was started."""


# Contexts


class ContextUnavailable(ExecutorError):
    """The context cannot run anything; another try would not change that."""


class ContextNotFound(ContextUnavailable, NotFound):
    pass


class ContextNotIdle(ContextUnavailable, Conflict):
    """The context is busy or dead."""


class ContextNotCreated(ExecutorError, Conflict):
    """The session has too many contexts, or the context's process did not start."""


# Files


class FileNotFound(ExecutorError, NotFound):
    pass


class FileConflict(ExecutorError, Conflict):
    """The state of the file or of its parent directory does not allow the operation."""


class FileTooLarge(ExecutorError, TooLarge):
    pass


class ExecutorBusy(ExecutorError, TemporaryError):
    """Too many file operations run at once."""


_REFUSALS: dict[str, type[ExecutorError]] = {
    "run_is_over": RunAcknowledged,
    "busy": SessionBusy,
    "stale": StaleSession,
    "leaving": ExecutorShuttingDown,
    "unknown_run": RunNotActive,
    "not_running": RunNotActive,
    "stdin_closed": StdinClosed,
    "stdin_full": StdinFull,
    "queue_full": QueueFull,
    "zygote_replaced": ZygoteReplaced,
    "context_not_found": ContextNotFound,
    "context_dead": ContextNotIdle,
    "context_busy": ContextNotIdle,
    "context_failed": ContextNotCreated,
    "too_many_contexts": ContextNotCreated,
}
_FILE_OPERATIONS = frozenset(
    {
        "chmod",
        "copy",
        "follow",
        "list",
        "mkdir",
        "move",
        "pack",
        "read",
        "remove",
        "search",
        "stat",
        "tree",
        "unpack",
        "write",
    }
)
_FILE_REFUSALS: dict[str, type[ExecutorError]] = {
    "file_not_found": FileNotFound,
    "is_directory": FileConflict,
    "not_directory": FileConflict,
    "file_exists": FileConflict,
    "not_empty": FileConflict,
    "not_a_file": FileConflict,
    "disk_full": FileConflict,
    "precondition_failed": FileConflict,
    "too_large": FileTooLarge,
    "executor_busy": ExecutorBusy,
}
_PUBLIC_CODES = {"executor_busy": LinkSaturated.code}
"""Codes of an executor for which clients get another one."""


def refusal(operation: str, code: str, message: str) -> ExecutorError:
    """The error of `operation` that the executor refused."""
    # The transfer of a checkpoint fails with codes of files as well, but never as a conflict: its
    # callers take a Conflict for a change of the session.
    if operation in _FILE_OPERATIONS:
        kind = _FILE_REFUSALS.get(code, RequestRefused)
        return kind(message, code=_PUBLIC_CODES.get(code, code))
    return _REFUSALS.get(code, RequestRefused)(message, code=code)
