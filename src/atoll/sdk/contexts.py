"""Contexts: interpreters that keep their state between runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from atoll.sdk.arguments import check_string, encode
from atoll.sdk.callbacks import Callbacks
from atoll.sdk.deletable import AsyncDeletable
from atoll.sdk.interactive_help import show_options
from atoll.sdk.options import CONTEXT_RUN_FIELDS
from atoll.sdk.paths import url_segment
from atoll.sdk.values import ContextInfo

if TYPE_CHECKING:
    from atoll.sdk.callbacks import (
        ApprovalCallback,
        DisplayCallback,
        EventCallback,
        OutputCallback,
    )
    from atoll.sdk.executions import AsyncExecution
    from atoll.sdk.options import ContextRunOptions
    from atoll.sdk.session import AsyncSession
    from atoll.sdk.values import Result


class AsyncContext(AsyncDeletable):
    """
    A Python process in a session that keeps variables, imports and open files between runs.

    A `with` block deletes it at its end. It is also deleted with its session.
    """

    def __init__(
        self, session: AsyncSession, info: ContextInfo, *, warns_if_unclosed: bool = False
    ) -> None:
        self._session = session
        self._http = session._http
        self._requests = session._requests
        self._info = info
        self._warns_if_unclosed = warns_if_unclosed
        self._path = f"sessions/{url_segment(info.session_id)}/contexts/{url_segment(info.id)}"

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def info(self) -> ContextInfo:
        """The context as of the last response. Call `refresh` to update it."""
        return self._info

    @property
    def _is_open(self) -> bool:
        return not self._deleted and self._session._is_open

    def __repr__(self) -> str:
        return f"<Context {self._info.id} {self._info.state}>"

    @show_options
    async def run(
        self,
        code: str,
        *,
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
        on_result: DisplayCallback | None = None,
        on_event: EventCallback | None = None,
        on_approval: ApprovalCallback | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[ContextRunOptions],
    ) -> Result:
        """
        Run `code` and wait for the result. `Result.results` contains what the code displayed and
        the value of its last expression; `on_result` receives each of them while the code runs.
        The other callbacks, `execution_id` and `idempotency_key` work as in `Session.run`.

        After `timeout` seconds the code is interrupted and the context keeps its state. Code that
        ignores the interrupt is killed two seconds later, and the context dies with it. Cancelling
        the call cancels the execution in the same way.
        """
        callbacks = Callbacks(on_stdout, on_stderr, on_event, on_approval, on_result)
        return await self._requests.run(self._body(code, options), idempotency_key, callbacks)

    @show_options
    async def submit(
        self,
        code: str,
        *,
        idempotency_key: str | None = None,
        **options: Unpack[ContextRunOptions],
    ) -> AsyncExecution:
        """Like `run`, but returns as soon as the server has accepted the execution."""
        return await self._requests.submit(self._body(code, options), idempotency_key)

    async def interrupt(self) -> ContextInfo:
        """Raise KeyboardInterrupt in the running code, if any. Variables are kept."""
        return await self._post("interrupt")

    async def restart(self) -> ContextInfo:
        """Start again with an empty state, even if the context is dead. Cancels running code."""
        return await self._post("restart")

    async def refresh(self) -> ContextInfo:
        """Fetch the current state of the context."""
        self._info = await self._http.fetch(ContextInfo, "GET", self._path)
        return self._info

    async def delete(self) -> None:
        """End the context and cancel its running code."""
        self._deleted = True
        await self._http.call("DELETE", self._path)

    async def _post(self, verb: str) -> ContextInfo:
        self._info = await self._http.fetch(ContextInfo, "POST", f"{self._path}/{verb}")
        return self._info

    def _body(self, code: str, options: ContextRunOptions) -> dict[str, Any]:
        check_string(code=code)
        body = encode(options, CONTEXT_RUN_FIELDS, call="context.run")
        return body | {"code": code, "language": "python", "context_id": self._info.id}
