"""One execution, from its submission to its result."""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict, TemporaryError
from atoll.sdk.arguments import (
    check_number,
    check_string,
    wrong_type,
)
from atoll.sdk.consoles import AsyncConsole, open_console
from atoll.sdk.decode import decode
from atoll.sdk.encoding import encode
from atoll.sdk.files import AsyncFiles
from atoll.sdk.options import RUN_FIELDS
from atoll.sdk.paths import url_segment
from atoll.sdk.retry import Backoff
from atoll.sdk.sse import events
from atoll.sdk.values import Answer, Approval, Artifact, Event, ExecutionInfo, Result, Status

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.sdk.file_transfer import ProgressCallback
    from atoll.sdk.http_client import HttpClient
    from atoll.sdk.options import RunOptions

# One request waits this long at most: proxies cut what takes longer.
_WAIT = 30.0
# Longer than the server leaves between two pings.
_READ_TIMEOUT = 45.0
# A connection that stood this long shows that the server is there, whatever cut it.
_STABLE_AFTER = 1.0
# In which a question gets from its event to where it can be answered.
_NEWS = 2.0
# Of stdin, in one request.
_PIECE = 256 * 1024


class AsyncExecution:
    """A handle on one execution; it is valid as long as the server keeps the record."""

    def __init__(self, http: HttpClient, execution_id: str) -> None:
        self._http = http
        self._id = execution_id
        self._path = f"executions/{url_segment(execution_id)}"

    @property
    def id(self) -> str:
        return self._id

    def __repr__(self) -> str:
        return f"<Execution {self._id}>"

    async def info(self) -> ExecutionInfo:
        """The whole record, with what is known of each artifact."""
        return decode(ExecutionInfo, await self._http.call("GET", self._path))

    async def status(self) -> Status:
        return decode(Status, await self._http.call("GET", f"{self._path}/status"))

    async def result(self) -> Result:
        """The result; raises `Conflict` with code `execution_not_finished` when it is too early."""
        return decode(Result, await self._http.call("GET", f"{self._path}/result"))

    async def artifacts(self) -> list[Artifact]:
        """The files that it made or changed."""
        answer = await self._http.call("GET", f"{self._path}/artifacts")
        return [decode(Artifact, item) for item in answer["items"]]

    async def download(
        self,
        artifact: str | Artifact,
        target: str | os.PathLike[str],
        *,
        progress: ProgressCallback | None = None,
    ) -> Path:
        """Copy one of its artifacts, as it is now, to this machine; see `files.download`."""
        session = url_segment((await self.info()).session_id)
        files = AsyncFiles(self._http, f"sessions/{session}")
        return await files.download(artifact, target, progress=progress)

    async def wait(self, wait: float | None = None) -> Result:
        """The result when it is there; raises `TimeoutError` after `wait` seconds, and the
        execution goes on. A server that is started again meanwhile is waited for."""
        check_number(wait=wait)
        now = asyncio.get_running_loop().time
        deadline = None if wait is None else now() + wait
        backoff = Backoff()
        while True:
            some = _WAIT if deadline is None else max(0.0, min(_WAIT, deadline - now()))
            try:
                answer = await self._http.try_call(
                    "GET", f"{self._path}/result", query={"wait": round(some, 3)}, wait=some
                )
                return decode(Result, answer)
            except Conflict as error:
                if error.code != "execution_not_finished":
                    raise
                backoff.reset()
            except TemporaryError as error:
                await self._endure(backoff, error)
            if deadline is not None and now() >= deadline:
                raise TimeoutError(f"{self._id} did not end within {wait:g} s; it goes on.")

    async def events(self, after: int = 0) -> AsyncIterator[Event]:
        """Everything that happened and happens to it, from behind the event with the sequence
        `after` on, live; ends after the `result`. A connection that is lost is taken up again where
        it broke: nothing is left out or told twice. Leaving it early changes nothing."""
        last, ended, over = after, False, False
        backoff = Backoff()
        now = asyncio.get_running_loop().time
        while not ended:
            headers = {"accept": "text/event-stream"}
            if last:
                headers["last-event-id"] = str(last)
            since: float | None = None
            try:
                async with self._http.stream(
                    "GET", f"{self._path}/events", headers=headers, wait=_READ_TIMEOUT
                ) as response:
                    since = now()
                    async for event in events(response.aiter_raw(), self._id):
                        backoff.reset()
                        if event.sequence and event.sequence <= last:
                            continue
                        last = max(last, event.sequence)
                        # Read on to the end of the answer: then the connection can be used again.
                        ended = event.kind == "result"
                        yield event
                if not ended and over:
                    return  # `after` is behind the result
                if not ended:
                    status = await self._http.try_call("GET", f"{self._path}/status")
                    over = decode(Status, status).ended
                    raise TemporaryError(
                        f"The events of {self._id} ended without a result.", code="stream_cut"
                    )
            except TemporaryError as error:
                if not ended:
                    if since is not None and now() - since > _STABLE_AFTER:
                        backoff.reset()
                    await self._endure(backoff, error)

    async def cancel(self, reason: str | None = None) -> Status:
        """End it: SIGTERM, and SIGKILL after a grace. One that has ended already stays as it is,
        which is no error: the status says how it ended."""
        body = {} if reason is None else {"reason": reason}
        try:
            return await self._post("cancel", body, once=True)
        except Conflict as error:
            if error.code != "execution_ended":
                raise
            return await self.status()

    async def approval(self) -> Approval | None:
        """The question that it waits to be answered."""
        return (await self.info()).approval

    async def approve(self, answer: Any = None, *, approval_id: str | None = None) -> Status:
        """Say yes to its question, with any JSON value. Raises `Conflict`: `no_approval` when it
        asks nothing, or not what `approval_id` names, `already_answered` when somebody else did."""
        return await self.answer(Answer(True, answer), approval_id=approval_id)

    async def refuse(self, reason: str | None = None, *, approval_id: str | None = None) -> Status:
        """Say no to its question; otherwise like `approve`."""
        return await self.answer(Answer(False, reason=reason), approval_id=approval_id)

    async def answer(self, answer: Answer, *, approval_id: str | None = None) -> Status:
        """What `approve` and `refuse` do. A question that is named by its id may be news that the
        server has yet to hear itself, and is given two seconds to get there."""
        body = {
            "approved": answer.approved,
            "answer": answer.answer,
            "reason": answer.reason,
            "approval_id": approval_id,
        }
        given = {name: value for name, value in body.items() if value is not None}
        now = asyncio.get_running_loop().time
        deadline, pause = now() + (0.0 if approval_id is None else _NEWS), 0.01
        while True:
            try:
                return await self._post("resume", given)
            except Conflict as error:
                running = error.details.get("status_now") in ("pending", "running")
                if error.code != "no_approval" or not running or now() >= deadline:
                    raise
            await asyncio.sleep(pause)
            pause *= 2

    async def send(self, message: str) -> Status:
        """Give it a message, which the code reads with `atoll_session.messages()`. Raises
        `Conflict` (`execution_not_running`) unless it runs, and `TemporaryError` (`queue_full`)
        when it leaves too many unread."""
        check_string(message=message)
        return await self._post("inject", {"message": message})

    async def write(self, data: str | bytes, *, eof: bool = False) -> Status:
        """More for its stdin, which was submitted with `stdin_open`; `eof` closes it behind that.
        Waits up to 30 s while the code does not read. Raises `Conflict`: `execution_not_running`,
        `stdin_closed`."""
        if not isinstance(data, str | bytes | bytearray | memoryview):
            raise wrong_type("data", "bytes or a string", data)
        raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else bytes(data)
        pieces = [raw[start : start + _PIECE] for start in range(0, len(raw), _PIECE)] or [b""]
        if not raw and not eof:
            return await self.status()
        backoff = Backoff()
        while True:
            body = {"stdin_base64": base64.b64encode(pieces[0]).decode()}
            try:
                status = await self._post("inject", body | {"eof": eof and len(pieces) == 1})
            except TemporaryError as error:
                if error.code != "queue_full":
                    raise
                await backoff.wait_or_raise(error)
                continue
            backoff.reset()
            del pieces[0]
            if not pieces:
                return status

    async def _post(self, verb: str, body: dict[str, Any], *, once: bool = False) -> Status:
        path = f"{self._path}/{verb}"
        return decode(Status, await self._http.call("POST", path, body=body, once=once))

    @asynccontextmanager
    async def console(self, *, watch: bool = False) -> AsyncIterator[AsyncConsole]:
        """Its terminal, or its pipes, for the length of an `async with`; it goes on after that.
        With `watch` this one never types, and takes nobody's turn to."""
        async with open_console(self._http, f"{self._path}/console", watch=watch) as console:
            yield console

    async def _endure(self, backoff: Backoff, error: TemporaryError) -> None:
        if not self._http.answered:
            raise error
        await backoff.wait_or_raise(error)


class AsyncExecutions:
    """All executions of the server."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def list(
        self,
        *,
        session_id: str | None = None,
        invocation_id: str | None = None,
        status: str | None = None,
    ) -> AsyncIterator[ExecutionInfo]:
        """Executions, newest first, of all sessions, or of one session or one invocation; pages
        are fetched as they are needed."""
        query = {"session_id": session_id, "invocation_id": invocation_id, "status": status}
        async for item in self._http.pages("executions", query):
            yield decode(ExecutionInfo, item)


def execute_body(code: str | None, options: RunOptions) -> dict[str, Any]:
    """The body of an `execute` request."""
    check_string(code=code)
    body = encode(options, RUN_FIELDS, call="run")
    return with_code(body, code)


def with_code(body: dict[str, Any], code: str | None) -> dict[str, Any]:
    """The body with its code. The language belongs to the code, not to a command."""
    language = body.pop("language", "python")
    if code is not None:
        body |= {"code": code, "language": language}
    if not body.get("stdin_open"):
        body.pop("stdin_open", None)
    return body
