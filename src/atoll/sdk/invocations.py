"""Invocations: requests to run something, whose id is theirs however often they are tried."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict, InvalidRequest
from atoll.sdk.arguments import check_string, check_string_dict
from atoll.sdk.decode import decode
from atoll.sdk.executions import AsyncExecution, check_run
from atoll.sdk.paths import url_segment
from atoll.sdk.values import ExecutionInfo, InvocationInfo, Result

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from atoll.sdk.http_client import HttpClient


class AsyncInvocation:
    """One request to run something, and its executions."""

    def __init__(self, http: HttpClient, info: InvocationInfo) -> None:
        self._http = http
        self._info = info
        self._path = f"invocations/{url_segment(info.invocation_id)}"

    @property
    def id(self) -> str:
        return self._info.invocation_id

    @property
    def info(self) -> InvocationInfo:
        """As of the last answer about it; `refresh` asks again."""
        return self._info

    @property
    def status(self) -> str:
        """accepted, running, succeeded, failed or cancelled, as of the last answer about it."""
        return self._info.status

    @property
    def execution(self) -> AsyncExecution:
        """Of its executions, the latest: to follow, to cancel, to talk to."""
        return AsyncExecution(self._http, self._info.execution_id)

    def __repr__(self) -> str:
        return f"<Invocation {self._info.invocation_id} {self._info.status}>"

    async def refresh(self) -> InvocationInfo:
        """Ask the server how it is."""
        self._info = decode(InvocationInfo, await self._http.call("GET", self._path))
        return self._info

    async def result(self) -> Result:
        """The result; raises `Conflict` with code `execution_not_finished` when it is too early."""
        return self._info.result or await self.execution.result()

    async def wait(self, wait: float | None = None) -> Result:
        """The result when it is there; raises `TimeoutError` after `wait` seconds, and the
        invocation goes on. A server that is started again meanwhile is waited for."""
        result = self._info.result
        if result is None:
            result = await self.execution.wait(wait)
            await self.refresh()
        return result

    async def executions(self) -> AsyncIterator[ExecutionInfo]:
        """Its executions, newest first."""
        async for item in self._http.pages(f"{self._path}/executions"):
            yield decode(ExecutionInfo, item)

    async def cancel(self, reason: str | None = None) -> InvocationInfo:
        """End it, whichever execution it is in; one that has ended already stays as it is, which is
        no error."""
        body = {} if reason is None else {"reason": reason}
        try:
            answer = await self._http.call("POST", f"{self._path}/cancel", body=body, once=True)
        except Conflict as error:
            # Ended by itself, just now or before.
            if error.code not in ("invocation_ended", "execution_ended"):
                raise
            return await self.refresh()
        self._info = decode(InvocationInfo, answer)
        return self._info


class AsyncInvocations:
    """All invocations of the server; new ones are made by `session.invoke`."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def get(self, invocation_id: str) -> AsyncInvocation:
        """The invocation with this id; raises `NotFound` when there is none."""
        answer = await self._http.call("GET", f"invocations/{url_segment(invocation_id)}")
        return AsyncInvocation(self._http, decode(InvocationInfo, answer))

    async def list(
        self, *, session_id: str | None = None, status: str | None = None
    ) -> AsyncIterator[AsyncInvocation]:
        """Invocations, newest first; pages are fetched as they are needed. One that has just begun
        to run may be listed as `accepted`."""
        query = {"session_id": session_id, "status": status}
        async for item in self._http.pages("invocations", query):
            yield AsyncInvocation(self._http, decode(InvocationInfo, item))


def invoke_body(
    session_id: str,
    function: str | None,
    code: str | None,
    command: Sequence[str] | None,
    language: str,
    input: Any,
    content_type: str | None,
    timeout: float | None,
    metadata: Mapping[str, str] | None,
    invocation_id: str | None,
    execution_id: str | None,
    stdin: str | None,
    stdin_open: bool,
    env: Mapping[str, str] | None,
    args: Sequence[str],
    cwd: str | None,
) -> dict[str, Any]:
    """What `POST invocations` is sent; what was not given is left to the server."""
    check_run(code, language, command, timeout, stdin, env, args, cwd, execution_id)
    check_string(function=function, content_type=content_type, invocation_id=invocation_id)
    check_string_dict(metadata=metadata)
    if timeout is not None and timeout <= 0:
        raise InvalidRequest("timeout is more than 0 seconds.", field="timeout")
    raw = isinstance(input, bytes | bytearray | memoryview)
    body = {
        "session_id": session_id,
        # The server holds a `sync` request as long as it may wait, and only its answer tells the
        # id; so who waits does it by the id.
        "mode": "async",
        "function_name": function,
        "code": code,
        "command": None if command is None else list(command),
        "language": str(language) if code is not None else None,
        "input": None if raw else input,
        "input_base64": base64.b64encode(input).decode() if raw else None,
        "content_type": content_type,
        "timeout_ms": None if timeout is None else max(1, round(timeout * 1000)),
        "metadata": dict(metadata) if metadata else None,
        "invocation_id": invocation_id,
        "execution_id": execution_id,
        "stdin": stdin,
        "stdin_open": stdin_open or None,
        "env": dict(env) if env else None,
        "args": list(args) or None,
        "cwd": cwd,
    }
    return {name: value for name, value in body.items() if value is not None}
