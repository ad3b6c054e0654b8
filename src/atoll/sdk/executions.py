"""Executions: wait for results, follow events, cancel, answer questions, send input."""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict, TemporaryError
from atoll.sdk.arguments import (
    check_number,
    check_string,
    encode,
    given,
    wrong_type,
)
from atoll.sdk.consoles import AsyncConsole, open_console
from atoll.sdk.decode import decode
from atoll.sdk.files import AsyncFiles
from atoll.sdk.options import RUN_FIELDS
from atoll.sdk.paths import url_segment
from atoll.sdk.retry import Backoff
from atoll.sdk.sse import READ_TIMEOUT, STABLE_AFTER, events
from atoll.sdk.values import Answer, Approval, Artifact, Event, ExecutionInfo, Result, Status

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.sdk.file_transfer import ProgressCallback
    from atoll.sdk.http_client import HttpClient
    from atoll.sdk.options import RunOptions

_MAX_WAIT = 30.0
"""Seconds that one request waits. Proxies cut longer requests."""
_ANSWER_DELAY = 2.0
"""Seconds that a question may take from its event until the server accepts answers."""
_CHUNK = 256 * 1024
"""Bytes of stdin in one request."""


class AsyncExecution:
    """A handle for one execution. It works as long as the server keeps the record."""

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
        """The record of the execution, with details of its artifacts."""
        return await self._http.fetch(ExecutionInfo, "GET", self._path)

    async def status(self) -> Status:
        return await self._http.fetch(Status, "GET", f"{self._path}/status")

    async def result(self) -> Result:
        """The result. Raises `Conflict` with the code `execution_not_finished` before the end."""
        return await self._http.fetch(Result, "GET", f"{self._path}/result")

    async def artifacts(self) -> list[Artifact]:
        """Files that it created or changed."""
        return [item async for item in self._http.items(Artifact, f"{self._path}/artifacts")]

    async def download(
        self,
        artifact: str | Artifact,
        target: str | os.PathLike[str],
        *,
        progress: ProgressCallback | None = None,
    ) -> Path:
        """Download an artifact in its current version; see `files.download`."""
        session = url_segment((await self.info()).session_id)
        files = AsyncFiles(self._http, f"sessions/{session}")
        return await files.download(artifact, target, progress=progress)

    async def wait(self, wait: float | None = None) -> Result:
        """
        Wait for the result. Raises `TimeoutError` after `wait` seconds; the execution continues.
        The call survives a restart of the server.
        """
        check_number(wait=wait)
        now = asyncio.get_running_loop().time
        deadline = None if wait is None else now() + wait
        backoff = Backoff()
        while True:
            seconds = _MAX_WAIT
            if deadline is not None:
                seconds = max(0.0, min(_MAX_WAIT, deadline - now()))
            try:
                answer = await self._http.try_call(
                    "GET", f"{self._path}/result", query={"wait": round(seconds, 3)}, wait=seconds
                )
                return decode(Result, answer)
            except Conflict as error:
                if error.code != "execution_not_finished":
                    raise
                backoff.reset()
            except TemporaryError as error:
                await self._retry(backoff, error)
            if deadline is not None and now() >= deadline:
                raise TimeoutError(
                    f"Execution {self._id} did not end within {wait:g} s. It is still running."
                )

    async def events(self, after: int = 0) -> AsyncIterator[Event]:
        """
        Past and live events, starting after the event with the sequence number `after`. Ends with
        the `result`. After a lost connection the stream resumes without gaps or repeats. Leaving
        the iteration early does not affect the execution.
        """
        last, ended, execution_ended = after, False, False
        backoff = Backoff()
        now = asyncio.get_running_loop().time
        while not ended:
            headers = {"accept": "text/event-stream"}
            if last:
                headers["last-event-id"] = str(last)
            since: float | None = None
            try:
                async with self._http.stream(
                    "GET", f"{self._path}/events", headers=headers, wait=READ_TIMEOUT
                ) as response:
                    since = now()
                    async for event in events(response.aiter_raw(), self._id):
                        backoff.reset()
                        if event.sequence and event.sequence <= last:
                            continue
                        last = max(last, event.sequence)
                        # Read to the end of the response, so that the connection can be reused.
                        ended = event.kind == "result"
                        yield event
                if not ended and execution_ended:
                    return  # `after` is the number of the result or a later one.
                if not ended:
                    status = await self._http.try_call("GET", f"{self._path}/status")
                    execution_ended = decode(Status, status).ended
                    raise TemporaryError(
                        f"The event stream of {self._id} ended without a result.", code="stream_cut"
                    )
            except TemporaryError as error:
                if not ended:
                    if since is not None and now() - since > STABLE_AFTER:
                        backoff.reset()
                    await self._retry(backoff, error)

    async def cancel(self, reason: str | None = None) -> Status:
        """
        Cancel the execution: SIGTERM, then SIGKILL after a grace period. Has no effect on an ended
        execution; the returned status shows how it ended.
        """
        body = {} if reason is None else {"reason": reason}
        try:
            return await self._post("cancel", body, once=True)
        except Conflict as error:
            if error.code != "execution_ended":
                raise
            return await self.status()

    async def approval(self) -> Approval | None:
        """The pending question, or None."""
        return (await self.info()).approval

    async def approve(self, answer: Any = None, *, approval_id: str | None = None) -> Status:
        """
        Approve the pending question, with any JSON value as the answer. Raises `Conflict` with the
        code `no_approval` if no question, or not the one with `approval_id`, is pending, and
        `already_answered` if another client was faster.
        """
        return await self.answer(Answer(True, answer), approval_id=approval_id)

    async def refuse(self, reason: str | None = None, *, approval_id: str | None = None) -> Status:
        """Refuse the pending question. See `approve`."""
        return await self.answer(Answer(False, reason=reason), approval_id=approval_id)

    async def answer(self, answer: Answer, *, approval_id: str | None = None) -> Status:
        """
        Answer the pending question, as `approve` and `refuse` do. A question with an `approval_id`
        may reach the client before the server can accept answers, so the call retries for two
        seconds.
        """
        body = given(
            approved=answer.approved,
            answer=answer.answer,
            reason=answer.reason,
            approval_id=approval_id,
        )
        now = asyncio.get_running_loop().time
        deadline, pause = now() + (0.0 if approval_id is None else _ANSWER_DELAY), 0.01
        while True:
            try:
                return await self._post("resume", body)
            except Conflict as error:
                running = error.details.get("status_now") in ("pending", "running")
                if error.code != "no_approval" or not running or now() >= deadline:
                    raise
            await asyncio.sleep(pause)
            pause *= 2

    async def send(self, message: str) -> Status:
        """
        Send a message, which the code reads with `atoll_session.messages()`. Raises `Conflict`
        (`execution_not_running`) unless the execution is running, and `TemporaryError`
        (`queue_full`) if too many messages are unread.
        """
        check_string(message=message)
        return await self._post("inject", {"message": message})

    async def write(self, data: str | bytes, *, eof: bool = False) -> Status:
        """
        Write to standard input, which must have been submitted with `stdin_open`; `eof` closes it.
        Waits up to 30 s if the code does not read. Raises `Conflict` with the code
        `execution_not_running` or `stdin_closed`.
        """
        if not isinstance(data, str | bytes | bytearray | memoryview):
            raise wrong_type("data", "bytes or a string", data)
        raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else bytes(data)
        pieces = [raw[start : start + _CHUNK] for start in range(0, len(raw), _CHUNK)] or [b""]
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
        return await self._http.fetch(Status, "POST", path, body=body, once=once)

    @asynccontextmanager
    async def console(self, *, watch: bool = False) -> AsyncIterator[AsyncConsole]:
        """
        Connect to the terminal or the pipes of the execution; use it with `async with`. The
        execution continues after the block. With `watch` this console cannot type.
        """
        async with open_console(self._http, f"{self._path}/console", watch=watch) as console:
            yield console

    async def _retry(self, backoff: Backoff, error: TemporaryError) -> None:
        if not self._http.has_responded:
            raise error
        await backoff.wait_or_raise(error)


class AsyncExecutions:
    """All executions of the server."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    def list(
        self,
        *,
        session_id: str | None = None,
        invocation_id: str | None = None,
        status: str | None = None,
    ) -> AsyncIterator[ExecutionInfo]:
        """Executions of all sessions, one session or one invocation, newest first."""
        query = {"session_id": session_id, "invocation_id": invocation_id, "status": status}
        return self._http.items(ExecutionInfo, "executions", query)


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
