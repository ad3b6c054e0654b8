"""Invocations: requests to run something, with ids that stay the same through retries."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict
from atoll.sdk.arguments import check_string, encode
from atoll.sdk.executions import AsyncExecution, with_code
from atoll.sdk.options import INVOKE_FIELDS
from atoll.sdk.paths import url_segment
from atoll.sdk.values import ExecutionInfo, InvocationInfo, Result

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.sdk.http_client import HttpClient
    from atoll.sdk.options import InvokeOptions


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
        """The invocation as of the last response. Call `refresh` to update it."""
        return self._info

    @property
    def status(self) -> str:
        """accepted, running, succeeded, failed or cancelled, as of the last response."""
        return self._info.status

    @property
    def execution(self) -> AsyncExecution:
        """The latest execution."""
        return AsyncExecution(self._http, self._info.execution_id)

    def __repr__(self) -> str:
        return f"<Invocation {self._info.invocation_id} {self._info.status}>"

    async def refresh(self) -> InvocationInfo:
        """Fetch the current state of the invocation."""
        self._info = await self._http.fetch(InvocationInfo, "GET", self._path)
        return self._info

    async def result(self) -> Result:
        """The result. Raises `Conflict` with the code `execution_not_finished` before the end."""
        return self._info.result or await self.execution.result()

    async def wait(self, wait: float | None = None) -> Result:
        """
        Wait for the result. Raises `TimeoutError` after `wait` seconds; the invocation continues.
        The call survives a restart of the server.
        """
        result = self._info.result
        if result is None:
            result = await self.execution.wait(wait)
            await self.refresh()
        return result

    def executions(self) -> AsyncIterator[ExecutionInfo]:
        """Executions of the invocation, newest first."""
        return self._http.items(ExecutionInfo, f"{self._path}/executions")

    async def cancel(self, reason: str | None = None) -> InvocationInfo:
        """Cancel the invocation with its execution. Has no effect on an ended invocation."""
        body = {} if reason is None else {"reason": reason}
        try:
            self._info = await self._http.fetch(
                InvocationInfo, "POST", f"{self._path}/cancel", body=body, once=True
            )
        except Conflict as error:
            # The invocation has ended already.
            if error.code not in ("invocation_ended", "execution_ended"):
                raise
            return await self.refresh()
        return self._info


class AsyncInvocations:
    """All invocations of the server. Create them with `session.invoke`."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def get(self, invocation_id: str) -> AsyncInvocation:
        """The invocation with this id. Raises `NotFound` if it does not exist."""
        path = f"invocations/{url_segment(invocation_id)}"
        return AsyncInvocation(self._http, await self._http.fetch(InvocationInfo, "GET", path))

    async def list(
        self, *, session_id: str | None = None, status: str | None = None
    ) -> AsyncIterator[AsyncInvocation]:
        """Invocations, newest first. One that has just started may still be `accepted`."""
        query = {"session_id": session_id, "status": status}
        async for info in self._http.items(InvocationInfo, "invocations", query):
            yield AsyncInvocation(self._http, info)


def invoke_body(
    session_id: str, function: str | None, input: Any, options: InvokeOptions
) -> dict[str, Any]:
    """The body of an `invocations` request."""
    check_string(function=function)
    body = encode(options, INVOKE_FIELDS, call="invoke")
    body = with_code(body, body.pop("code", None))
    # A `sync` request would return the id, which is needed to cancel, only with the result. So the
    # client submits in mode `async` and waits for the result by id.
    body |= {"session_id": session_id, "mode": "async"}
    if function is not None:
        body["function_name"] = function
    if isinstance(input, bytes | bytearray | memoryview):
        body["input_base64"] = base64.b64encode(input).decode()
    elif input is not None:
        body["input"] = input
    return body
