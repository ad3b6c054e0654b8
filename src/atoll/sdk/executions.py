"""One execution, from its submission to its result."""

from __future__ import annotations

import asyncio
import codecs
import inspect
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict, InvalidRequest, TemporaryError
from atoll.sdk.consoles import AsyncConsole, opened
from atoll.sdk.decode import decode
from atoll.sdk.displays import Display
from atoll.sdk.events import events
from atoll.sdk.paths import segment
from atoll.sdk.patience import Patience
from atoll.sdk.values import Event, ExecutionInfo, Result, Status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from atoll.sdk.connection import Connection

OutputCallback = Callable[[str], object]
"""Is given output as it comes; an awaitable that it returns is awaited."""
DisplayCallback = Callable[[Display], object]
"""The same for what a context shows."""

# One request waits this long at most: proxies cut what takes longer.
_WAIT = 30.0
# Longer than the server leaves between two pings.
_SILENCE = 45.0


class AsyncExecution:
    """A handle on one execution; it is valid as long as the server keeps the record."""

    def __init__(self, connection: Connection, execution_id: str) -> None:
        self._connection = connection
        self._id = execution_id
        self._path = f"executions/{segment(execution_id)}"

    @property
    def id(self) -> str:
        return self._id

    def __repr__(self) -> str:
        return f"<Execution {self._id}>"

    async def info(self) -> ExecutionInfo:
        """The whole record, with what is known of each artifact."""
        return decode(ExecutionInfo, await self._connection.call("GET", self._path))

    async def status(self) -> Status:
        return decode(Status, await self._connection.call("GET", f"{self._path}/status"))

    async def result(self) -> Result:
        """The result; raises `Conflict` with code `execution_not_finished` when it is too early."""
        return decode(Result, await self._connection.call("GET", f"{self._path}/result"))

    async def wait(self, timeout: float | None = None) -> Result:
        """The result when it is there; raises `TimeoutError` after `timeout` seconds, and the
        execution goes on. A server that is started again meanwhile is waited for."""
        now = asyncio.get_running_loop().time
        deadline = None if timeout is None else now() + timeout
        patience = Patience()
        while True:
            wait = _WAIT if deadline is None else max(0.0, min(_WAIT, deadline - now()))
            try:
                answer = await self._connection.call(
                    "GET", f"{self._path}/result", query={"wait": round(wait, 3)}, wait=wait
                )
                return decode(Result, answer)
            except Conflict as error:
                if error.code != "execution_not_finished":
                    raise
                patience.renew()
            except TemporaryError as error:
                await self._endure(patience, error)
            if deadline is not None and now() >= deadline:
                raise TimeoutError(f"{self._id} did not end within {timeout:g} s; it goes on.")

    async def cancel(self) -> Status:
        """End it; one that has ended already stays as it is."""
        return decode(Status, await self._connection.call("POST", f"{self._path}/cancel"))

    async def events(self) -> AsyncIterator[Event]:
        """Everything it did and does, from the start, live; ends after the `result`. A connection
        that is lost is taken up again where it broke."""
        last, ended = 0, False
        patience = Patience()
        while not ended:
            headers = {"accept": "text/event-stream"}
            if last:
                headers["last-event-id"] = str(last)
            try:
                async with self._connection.stream(
                    "GET", f"{self._path}/events", headers=headers, wait=_SILENCE
                ) as response:
                    async for event in events(response.aiter_raw()):
                        patience.renew()
                        if event.sequence and event.sequence <= last:
                            continue
                        last = max(last, event.sequence)
                        # Read on to the end of the answer: then the connection can be used again.
                        ended = event.kind == "result"
                        yield event
                if not ended:
                    raise TemporaryError(
                        f"The events of {self._id} ended without a result.", code="stream_cut"
                    )
            except TemporaryError as error:
                if not ended:
                    await self._endure(patience, error)

    @asynccontextmanager
    async def console(self, *, watch: bool = False) -> AsyncIterator[AsyncConsole]:
        """Its terminal, or its pipes, for the length of an `async with`; it goes on after that.
        With `watch` this one never types, and takes nobody's turn to."""
        async with opened(self._connection, f"{self._path}/console", watch=watch) as console:
            yield console

    async def _endure(self, patience: Patience, error: TemporaryError) -> None:
        if not self._connection.answered:
            raise error
        await patience.endure(error)


async def follow(
    execution: AsyncExecution,
    on_stdout: OutputCallback | None,
    on_stderr: OutputCallback | None,
    on_result: DisplayCallback | None = None,
) -> Result:
    """Hand output to the callbacks until the result comes."""
    decoder = codecs.getincrementaldecoder("utf-8")
    outputs = {
        kind: (decoder("replace"), callback)
        for kind, callback in (("stdout", on_stdout), ("stderr", on_stderr))
        if callback is not None
    }
    result: Result | None = None
    async for event in execution.events():
        result = event.result
        if event.display is not None and on_result is not None:
            outcome = on_result(event.display)
            if inspect.isawaitable(outcome):
                await outcome
        for kind, (text, callback) in outputs.items():
            ended = event.kind == "result"
            if (ended or event.kind == kind) and (piece := text.decode(event.data, ended)):
                outcome = callback(piece)
                if inspect.isawaitable(outcome):
                    await outcome
    assert result is not None, "events end with a result"
    return result


def execute_body(
    code: str | None,
    language: str,
    command: Sequence[str] | None,
    event: Any,
    timeout: float | None,
    stdin: str | None,
    env: Mapping[str, str] | None,
    args: Sequence[str],
    cwd: str | None,
) -> dict[str, Any]:
    """What `execute` is sent; what was not given is left to the server."""
    for name, value in (("command", command), ("args", args)):
        if isinstance(value, str):
            raise InvalidRequest(
                f'{name} is a list of strings. A line for the shell is code with language="shell".',
                field=name,
            )
    body = {
        "code": code,
        "language": str(language) if code is not None else None,
        "command": None if command is None else list(command),
        "event": event,
        "timeout": timeout,
        "stdin": stdin,
        "env": dict(env) if env else None,
        "args": list(args) or None,
        "cwd": cwd,
    }
    return {name: value for name, value in body.items() if value is not None}
