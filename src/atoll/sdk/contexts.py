"""Contexts: where code finds what the code before it left behind."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Self

from atoll.errors import NotFound
from atoll.sdk.callbacks import Callbacks
from atoll.sdk.decode import decode
from atoll.sdk.executions import execute_body
from atoll.sdk.paths import url_segment
from atoll.sdk.pending import warn_unclosed
from atoll.sdk.retry import best_effort
from atoll.sdk.values import ContextInfo

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from atoll.sdk.callbacks import (
        ApprovalCallback,
        DisplayCallback,
        EventCallback,
        OutputCallback,
    )
    from atoll.sdk.executions import AsyncExecution
    from atoll.sdk.http_client import HttpClient
    from atoll.sdk.session import AsyncSession
    from atoll.sdk.values import Result


class AsyncContext:
    """
    A Python process of a session that keeps variables, imports and open files between runs.

    It is deleted when a `with` block of it is left, and in any case with its session.
    """

    def __init__(
        self,
        http: HttpClient,
        session: AsyncSession,
        info: ContextInfo,
        *,
        scoped: bool = False,
    ) -> None:
        self._http = http
        self._session = session
        self._info = info
        self._needs_close = scoped
        """Whether it is meant for a `with` block."""
        self._deleted = False
        self._path = f"sessions/{url_segment(info.session_id)}/contexts/{url_segment(info.id)}"

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def info(self) -> ContextInfo:
        """As of the last answer about it; `refresh` asks again."""
        return self._info

    def __repr__(self) -> str:
        return f"<Context {self._info.id} {self._info.state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            await best_effort(self.delete())
            return
        with suppress(NotFound):
            await self.delete()

    def __del__(self) -> None:
        # What was not made completely has no such attribute. With its session it ends too.
        if self.__dict__.get("_needs_close") and not self._deleted and self._session._is_open:
            warn_unclosed(self)

    async def run(
        self,
        code: str,
        *,
        timeout: float | None = None,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
        on_result: DisplayCallback | None = None,
        on_event: EventCallback | None = None,
        on_approval: ApprovalCallback | None = None,
        execution_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> Result:
        """
        Run `code` and wait for its end. `Result.results` has the value of its last expression and
        all that it displayed; `on_result` is given each as it comes. The other callbacks, an
        `execution_id` and an `idempotency_key` do what they do in `Session.run`.

        After `timeout` seconds it is interrupted, and what was there before is kept; code that does
        not heed that is ended two seconds later, and the context with it. When the call is
        cancelled, so is the execution, in the same way.
        """
        body = self._body(code, timeout, stdin, env, execution_id)
        callbacks = Callbacks(on_stdout, on_stderr, on_event, on_approval, on_result)
        return await self._session._run(body, idempotency_key, callbacks)

    async def submit(
        self,
        code: str,
        *,
        timeout: float | None = None,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        execution_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncExecution:
        """Like `run`, without waiting for anything but the server's word that it will be run."""
        body = self._body(code, timeout, stdin, env, execution_id)
        return await self._session._submit(body, idempotency_key)

    async def interrupt(self) -> ContextInfo:
        """KeyboardInterrupt in what runs now, if anything does; the variables stay."""
        return await self._post("interrupt")

    async def restart(self) -> ContextInfo:
        """Begin anew, with nothing; what runs is cancelled. This is what a dead one needs."""
        return await self._post("restart")

    async def refresh(self) -> ContextInfo:
        """Ask the server how it is."""
        self._info = decode(ContextInfo, await self._http.call("GET", self._path))
        return self._info

    async def delete(self) -> None:
        """End it; what runs is cancelled."""
        self._deleted = True
        await self._http.call("DELETE", self._path)

    async def _post(self, verb: str) -> ContextInfo:
        answer = await self._http.call("POST", f"{self._path}/{verb}")
        self._info = decode(ContextInfo, answer)
        return self._info

    def _body(
        self,
        code: str,
        timeout: float | None,
        stdin: str | None,
        env: Mapping[str, str] | None,
        execution_id: str | None,
    ) -> dict[str, object]:
        body = execute_body(code, "python", None, None, timeout, stdin, env, (), None, execution_id)
        return {**body, "context_id": self._info.id}
