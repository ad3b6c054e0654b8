"""
Callbacks that receive the events of a running execution.

A callback may be a function or a coroutine function. Calls do not overlap: the next event waits
until the callback has returned. An error in a callback stops all of them. Output callbacks receive
text, in which characters are never split.
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
"""Receives output as it arrives. May be async."""
DisplayCallback = Callable[[Display], object]
"""Receives what a context displays. May be async."""
EventCallback = Callable[[Event], object]
"""Receives every event. May be async."""
ApprovalCallback = Callable[[Approval], Any]
"""Receives a question and returns True, False, an `Answer`, or None to leave it to others."""


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
    """Call the callbacks until the result arrives, and return it."""
    decoder = codecs.getincrementaldecoder("utf-8")
    outputs = {
        kind: (decoder("replace"), callback)
        for kind, callback in (("stdout", callbacks.on_stdout), ("stderr", callbacks.on_stderr))
        if callback is not None
    }
    answers = _AnswerSender(execution)
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
                    # The lost attempt may have ended in the middle of a character.
                    text.reset()
                ended = event.kind == "result"
                if (ended or event.kind == kind) and (piece := text.decode(event.data, ended)):
                    await invoke_callback(callback, piece)
            if callbacks.on_approval is not None and event.approval is not None:
                await answers.handle(event.approval, callbacks.on_approval)
    finally:
        await answers.close()
    assert result is not None, "events end with a result"
    return result


class _AnswerSender:
    """
    Sends the answers of a callback to the server, in the background.

    An answer is repeated until the server accepts it. The server may not know the question yet,
    because the event was faster or the server has restarted. Another client's answer, or a
    timeout, arrives as an event and ends the attempts.
    """

    def __init__(self, execution: AsyncExecution) -> None:
        self._execution = execution
        self._sending: dict[str, asyncio.Task[None]] = {}

    async def handle(self, approval: Approval, on_approval: ApprovalCallback) -> None:
        if not approval.asked:
            if (sending := self._sending.pop(approval.id, None)) is not None:
                sending.cancel()
            return
        answer = await invoke_callback(on_approval, approval)
        if answer is not None:
            sending = asyncio.create_task(self._send(approval.id, _answer_of(answer)))
            self._sending[approval.id] = sending

    def check(self) -> None:
        """Raise the error of a failed answer."""
        for sending in self._sending.values():
            if sending.done() and not sending.cancelled():
                sending.result()

    async def close(self) -> None:
        for sending in self._sending.values():
            sending.cancel()
        await asyncio.gather(*self._sending.values(), return_exceptions=True)

    async def _send(self, approval_id: str, answer: Answer) -> None:
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
                pass  # The event stream limits how long an outage may take.
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)


def _answer_of(value: object) -> Answer:
    """Only True is consent. Truthy values are not: "no" is one."""
    if isinstance(value, bool):
        return Answer(value)
    if isinstance(value, Answer):
        return value
    raise TypeError(
        "on_approval must return True, False, an Answer, or None to leave the question to others, "
        f"not {type(value).__name__}."
    )


async def invoke_callback(callback: Callable[..., Any], *arguments: Any) -> Any:
    outcome = callback(*arguments)
    # Twice for a coroutine function that was passed from another thread.
    while inspect.isawaitable(outcome):
        outcome = await outcome
    return outcome
