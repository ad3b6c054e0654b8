"""Events of a running execution, from its event stream and from a console."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from atoll.sdk.displays import Display  # noqa: TC001
from atoll.sdk.values.approvals import Approval  # noqa: TC001
from atoll.sdk.values.executions import ErrorInfo, Result  # noqa: TC001


@dataclass(frozen=True, slots=True)
class Retry:
    """An attempt was lost by no fault of the code, and there is to be another."""

    attempt: int
    """The number of the next one; the first was 1."""
    cause: str | None = None
    message: str | None = None
    delay: float | None = None
    """Seconds until then."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an execution, in order; the last one is its `result`."""

    sequence: int
    """Grows; 0 for `queued` and `heartbeat`, which only tell how things are at the moment."""
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
    """Output as it was written; a chunk may end in the middle of a character."""
    result: Result | None = None
    display: Display | None = None
    """What a context showed."""
    approval: Approval | None = None
    retry: Retry | None = None
    ahead: int | None = None
    """Of `queued`: how many executions are before it in its session."""
    attempt: int | None = None
    """Of `started`: which attempt; the first is 1."""
    execution_id: str = ""

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ConsoleExit:
    """How an execution ended that was watched on a console."""

    status: str
    """completed, failed, timeout, crashed or cancelled."""
    exit_code: int | None = None
    signal: str | None = None
    cause: str | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class ConsoleEvent:
    """Something that a console tells; the last one is the `exit`."""

    kind: Literal["stdout", "stderr", "status", "error", "exit"]
    data: bytes = b""
    """Output as it was written; a terminal has only stdout."""
    status: str | None = None
    typing: bool = False
    """With `status`: whether this console may type."""
    code: str | None = None
    message: str | None = None
    """With `error`: what of this console's input was refused, and why."""
    exit: ConsoleExit | None = None

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")
