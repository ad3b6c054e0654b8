"""Events of a running execution, from its event stream and from a console."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from atoll.sdk.displays import Display  # noqa: TC001
from atoll.sdk.values.executions import Approval, ErrorInfo, Result  # noqa: TC001


@dataclass(frozen=True, slots=True)
class Retry:
    """An attempt was lost through no fault of the code and will be retried."""

    attempt: int
    """Number of the next attempt; the first is 1."""
    cause: str | None = None
    message: str | None = None
    delay: float | None = None
    """Seconds until the next attempt."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of an execution. The last one is its `result`."""

    sequence: int
    """Increasing number. 0 for `queued` and `heartbeat`, which are not stored."""
    kind: Literal[
        "queued",
        "started",
        "stdout",
        "stderr",
        "display",
        "approval",
        "heartbeat",
        "retry",
        "result",
    ]
    data: bytes = b""
    """Output bytes. A chunk may end in the middle of a character."""
    result: Result | None = None
    display: Display | None = None
    """What a context displayed."""
    approval: Approval | None = None
    retry: Retry | None = None
    ahead: int | None = None
    """For `queued`: number of executions ahead of it in its session."""
    attempt: int | None = None
    """For `started`: number of the attempt; the first is 1."""
    execution_id: str = ""

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ConsoleExit:
    """The end of an execution with a console."""

    status: str
    """completed, failed, timeout, crashed or cancelled."""
    exit_code: int | None = None
    signal: str | None = None
    cause: str | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class ConsoleEvent:
    """An event of a console. The last one is the `exit`."""

    kind: Literal["stdout", "stderr", "status", "error", "exit"]
    data: bytes = b""
    """Output bytes. On a terminal all output is stdout."""
    status: str | None = None
    typing: bool = False
    """For `status`: whether this console may type."""
    code: str | None = None
    message: str | None = None
    """For `error`: why input of this console was refused."""
    exit: ConsoleExit | None = None

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")
