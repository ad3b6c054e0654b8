"""
Functions that are told what happens to an execution while it runs.

Each may be an ordinary or a coroutine function, and is called for one event after the other: the
next one waits until it has returned. What one raises ends the following. Output is handed over as
text, and a character is never cut in two.
"""

from __future__ import annotations

import codecs
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict
from atoll.sdk.displays import Display
from atoll.sdk.values import Answer, Approval, Event, Result

if TYPE_CHECKING:
    from atoll.sdk.executions import AsyncExecution

OutputCallback = Callable[[str], object]
"""Is given output as it comes; an awaitable that it returns is awaited."""
DisplayCallback = Callable[[Display], object]
"""The same for what a context shows."""
EventCallback = Callable[[Event], object]
"""The same for every event."""
ApprovalCallback = Callable[[Approval], Any]
"""Is given a question, returns the answer: a bool, an `Answer`, or None to leave it to others."""


@dataclass(frozen=True)
class Callbacks:
    on_stdout: OutputCallback | None = None
    on_stderr: OutputCallback | None = None
    on_event: EventCallback | None = None
    on_approval: ApprovalCallback | None = None
    on_display: DisplayCallback | None = None

    def __bool__(self) -> bool:
        return any(vars(self).values())


async def follow(execution: AsyncExecution, callbacks: Callbacks) -> Result:
    """Tell the callbacks what happens until the result comes."""
    decoder = codecs.getincrementaldecoder("utf-8")
    outputs = {
        kind: (decoder("replace"), callback)
        for kind, callback in (("stdout", callbacks.on_stdout), ("stderr", callbacks.on_stderr))
        if callback is not None
    }
    result: Result | None = None
    async for event in execution.events():
        result = event.result
        if callbacks.on_event is not None:
            await _called(callbacks.on_event, event)
        if callbacks.on_display is not None and event.display is not None:
            await _called(callbacks.on_display, event.display)
        for kind, (text, callback) in outputs.items():
            if event.kind == "retry":
                # Nothing will come to complete the character that the lost attempt began.
                text.reset()
            ended = event.kind == "result"
            if (ended or event.kind == kind) and (piece := text.decode(event.data, ended)):
                await _called(callback, piece)
        if callbacks.on_approval is not None and event.approval is not None:
            await _ask(execution, event.approval, callbacks.on_approval)
    assert result is not None, "events end with a result"
    return result


async def _ask(
    execution: AsyncExecution, approval: Approval, on_approval: ApprovalCallback
) -> None:
    if not approval.asked:
        return
    given = await _called(on_approval, approval)
    if given is None:
        return
    answer = given if isinstance(given, Answer) else Answer(bool(given))
    try:
        await execution.answer(answer, approval_id=approval.id)
    except Conflict as error:
        # Somebody else was quicker, or the time is over.
        if error.code not in ("no_approval", "already_answered"):
            raise


async def _called(callback: Callable[[Any], Any], argument: Any) -> Any:
    outcome = callback(argument)
    # Twice for a coroutine function that was handed over from another thread.
    while inspect.isawaitable(outcome):
        outcome = await outcome
    return outcome
