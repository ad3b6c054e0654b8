"""Events of a stream that a client follows: output of an execution, progress of a build."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from atoll.model.execution import Execution


class StreamEvent(NamedTuple):
    number: int | None
    """Position in the stream, for `Last-Event-ID`; null for an event that is not replayed."""
    name: str
    content: bytes | dict[str, Any] | Execution
