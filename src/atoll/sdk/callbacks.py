"""
Functions that are told what happens to an execution while it runs.

Each may be an ordinary or a coroutine function, and is called for one event after the other: the
next one waits until it has returned. What one raises ends the following. Output is handed over as
text, and a character is never cut in two.
"""

from __future__ import annotations

import asyncio
import codecs
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict, TemporaryError
from atoll.sdk.arguments import check_functions
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

    def __post_init__(self) -> None:
        check_functions(
            on_stdout=self.on_stdout,
            on_stderr=self.on_stderr,
            on_event=self.on_event,
            on_approval=self.on_approval,
            on_result=self.on_display,
        )

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
    answers = _Answers(execution)
    result: Result | None = None
    try:
        async for event in execution.events():
            result = event.result
            answers.check()
            if callbacks.on_event is not None:
                await invoke_callback(callbacks.on_event, event)
            if callbacks.on_display is not None and event.display is not None:
                await invoke_callback(callbacks.on_display, event.display)
            for kind, (text, callback) in outputs.items():
                if event.kind == "retry":
                    # Nothing will come to complete the character that the lost attempt began.
                    text.reset()
                ended = event.kind == "result"
                if (ended or event.kind == kind) and (piece := text.decode(event.data, ended)):
                    await invoke_callback(callback, piece)
            if callbacks.on_approval is not None and event.approval is not None:
                await answers.hear(event.approval, callbacks.on_approval)
    finally:
        await answers.close()
    assert result is not None, "events end with a result"
    return result


class _Answers:
    """
    Answers on their way to the server.

    Given again until it takes them, which it cannot before it was told of the question itself: when
    the event outran that, or the server was started again meanwhile. Whatever settles a question,
    an answer of somebody else or the end of its time, is an event, and ends the trying.
    """

    def __init__(self, execution: AsyncExecution) -> None:
        self._execution = execution
        self._giving: dict[str, asyncio.Task[None]] = {}

    async def hear(self, approval: Approval, on_approval: ApprovalCallback) -> None:
        if not approval.asked:
            if (giving := self._giving.pop(approval.id, None)) is not None:
                giving.cancel()
            return
        given = await invoke_callback(on_approval, approval)
        if given is not None:
            giving = asyncio.create_task(self._give(approval.id, _answer(given)))
            self._giving[approval.id] = giving

    def check(self) -> None:
        """Raise what an answer failed of."""
        for giving in self._giving.values():
            if giving.done() and not giving.cancelled():
                giving.result()

    async def close(self) -> None:
        for giving in self._giving.values():
            giving.cancel()
        await asyncio.gather(*self._giving.values(), return_exceptions=True)

    async def _give(self, approval_id: str, answer: Answer) -> None:
        pause = 0.05
        while True:
            try:
                await self._execution.answer(answer, approval_id=approval_id)
                return
            except Conflict as error:
                if error.code == "already_answered":
                    return
                if error.code != "no_approval":
                    raise
            except TemporaryError:
                pass  # The events know how long to wait for a server.
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)


def _answer(given: object) -> Answer:
    """Whether something else is true is no consent: "no" would be."""
    if isinstance(given, bool):
        return Answer(given)
    if isinstance(given, Answer):
        return given
    raise TypeError(
        "on_approval returns True, False, an Answer, or None to leave the question to others, "
        f"not {type(given).__name__}."
    )


async def invoke_callback(callback: Callable[..., Any], *arguments: Any) -> Any:
    outcome = callback(*arguments)
    # Twice for a coroutine function that was handed over from another thread.
    while inspect.isawaitable(outcome):
        outcome = await outcome
    return outcome
