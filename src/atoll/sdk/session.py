"""One session: running code in it, and what belongs to it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Self

from atoll import ids
from atoll.errors import NotFound
from atoll.sdk.arguments import check_numbers, check_string, check_string_dict, check_string_list
from atoll.sdk.attribute_hints import SESSION_ALTERNATIVES, AttributeHints
from atoll.sdk.callbacks import Callbacks, follow
from atoll.sdk.contexts import AsyncContext
from atoll.sdk.decode import decode
from atoll.sdk.dependencies import INSTALL_TIMEOUT, dependencies_body
from atoll.sdk.executions import AsyncExecution, execute_body
from atoll.sdk.files import AsyncFiles
from atoll.sdk.invocations import AsyncInvocation, invoke_body
from atoll.sdk.paths import url_segment
from atoll.sdk.pending import Pending, warn_unclosed
from atoll.sdk.retry import best_effort, new_key, undo_if_cancelled
from atoll.sdk.secrets import AsyncSecrets
from atoll.sdk.state_requests import change_body, request_state
from atoll.sdk.values import (
    Artifact,
    Checkpoint,
    ContextInfo,
    Event,
    ExecutionInfo,
    InvocationInfo,
    Packages,
    ProcessInfo,
    Result,
    SessionInfo,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
    from types import TracebackType

    from atoll.sdk.callbacks import ApprovalCallback, EventCallback, OutputCallback
    from atoll.sdk.http_client import HttpClient

# Short executions are answered by the request that submits them. It must not wait much longer: only
# its answer tells the id, without which an execution cannot be cancelled.
_FIRST_WAIT = 1.0
# Beyond what one answer may take: saving goes by what has changed.
_SAVE_WAIT = 600.0
_LEFT = "Its caller left."
"""The reason of a cancellation that nobody asked for in words."""


class AsyncSession(AttributeHints):
    """
    A sandbox that lives until it is deleted or its time is over. A `with` block deletes it at its
    end. At rest (stopped, archived) it has its files and uses neither memory nor CPU time; what is
    asked of it starts it again.
    """

    ALTERNATIVES = SESSION_ALTERNATIVES

    def __init__(self, http: HttpClient, info: SessionInfo) -> None:
        self._http = http
        self._info = info
        self._needs_close = False
        self._deleted = False
        self._path = f"sessions/{url_segment(info.id)}"
        self._files = AsyncFiles(http, self._path)
        self._secrets = AsyncSecrets(http, self._path)

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def info(self) -> SessionInfo:
        """As of the last answer about it; `refresh` asks again."""
        return self._info

    @property
    def files(self) -> AsyncFiles:
        """Its workspace."""
        return self._files

    @property
    def secrets(self) -> AsyncSecrets:
        """Variables whose values nobody is shown."""
        return self._secrets

    def _expect_close(self) -> Self:
        """Warn if it is neither deleted nor the subject of a `with` block."""
        self._needs_close = True
        return self

    @property
    def _is_open(self) -> bool:
        """Whether it may be there, as far as this object knows; embedded ones end with the host."""
        embedded = self._http.endpoint.url is None
        return not self._deleted and not (embedded and self._http.closed)

    def __repr__(self) -> str:
        return f"<Session {self._info.id} {self._info.status}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # It must not be hidden by one of ours.
            await best_effort(self.delete())
            return
        with suppress(NotFound):
            await self.delete()

    def __del__(self) -> None:
        # What was not made completely has no such attribute.
        if self.__dict__.get("_needs_close") and self._is_open:
            warn_unclosed(self)

    async def run(
        self,
        code: str | None = None,
        *,
        language: str = "python",
        command: Sequence[str] | None = None,
        event: Any = None,
        timeout: float | None = None,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        cwd: str | None = None,
        stdin_open: bool = False,
        wait: float | None = None,
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
        on_event: EventCallback | None = None,
        on_approval: ApprovalCallback | None = None,
        execution_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> Result:
        """
        Run `code` in a `language` (python, javascript, shell) or a `command`, and wait for its end.

        Python code that defines `handler` has it called with `event`; what it returns is the
        result's `return_value`. A program that fails is a result, not an exception: see `Result.ok`
        and `Result.check`.

        `timeout` is how long the code may run, `wait` how long this call waits, in seconds; after
        `wait` it raises `TimeoutError`. However the call is left before the end, by that, by an
        error in a callback or because it was cancelled, the execution is cancelled.

        The callbacks are told what happens as it happens: `on_stdout` and `on_stderr` get text,
        `on_event` every `Event`. `on_approval` gets an `Approval` that the code asks for; what it
        returns is the answer: a bool, an `Answer`, or None to leave it to somebody else.

        A connection that breaks does not matter, nor a server that is away for less than 30 s. With
        an `execution_id` of your own, or an `idempotency_key`, it is run once, however many calls
        ask for it.
        """
        body = execute_body(
            code, language, command, event, timeout, stdin, env, args, cwd, execution_id, stdin_open
        )
        callbacks = Callbacks(on_stdout, on_stderr, on_event, on_approval)
        async with _within(wait):
            return await self._run(body, idempotency_key, callbacks, wait)

    async def stream(
        self,
        code: str | None = None,
        *,
        language: str = "python",
        command: Sequence[str] | None = None,
        event: Any = None,
        timeout: float | None = None,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        cwd: str | None = None,
        stdin_open: bool = False,
        execution_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncIterator[Event]:
        """
        Like `run`, giving the events as they happen; the last one is the `result`.

        A connection that breaks is taken up again where it broke, with no gap and no repeat, also
        when the server was started again. Leaving the iteration before the end cancels the
        execution; `submit` and `events` leave it running. Each event has the `execution_id`, by
        which `execution` talks to it meanwhile.
        """
        body = execute_body(
            code, language, command, event, timeout, stdin, env, args, cwd, execution_id, stdin_open
        )
        execution = await self._submit(body, idempotency_key)
        ended = False
        try:
            async for happened in execution.events():
                ended = happened.kind == "result"
                yield happened
        finally:
            if not ended and not self._http.closed:
                await best_effort(execution.cancel(_LEFT))

    async def submit(
        self,
        code: str | None = None,
        *,
        language: str = "python",
        command: Sequence[str] | None = None,
        event: Any = None,
        timeout: float | None = None,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        cwd: str | None = None,
        stdin_open: bool = False,
        execution_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncExecution:
        """
        Like `run`, without waiting for anything but the server's word that it will be run. With
        `stdin_open` its stdin stays open behind `stdin`, for `execution.write`.
        """
        body = execute_body(
            code, language, command, event, timeout, stdin, env, args, cwd, execution_id, stdin_open
        )
        return await self._submit(body, idempotency_key)

    async def invoke(
        self,
        function: str | None = None,
        *,
        code: str | None = None,
        command: Sequence[str] | None = None,
        language: str = "python",
        input: Any = None,
        content_type: str | None = None,
        timeout: float | None = None,
        wait: float | None = None,
        mode: Literal["sync", "async"] = "sync",
        metadata: Mapping[str, str] | None = None,
        invocation_id: str | None = None,
        execution_id: str | None = None,
        stdin: str | None = None,
        stdin_open: bool = False,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        cwd: str | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncInvocation:
        """
        Call a `function`: one that `code` defines, or `module:name` in the workspace. Or run `code`
        or a `command` as `run` does.

        The function is given `input`, a JSON value or bytes with a `content_type`; what it returns
        is the `return_value` of the result. In mode `sync` this waits for the end, for `wait`
        seconds at most as `run` does; in mode `async` for nothing. `metadata` is kept with the
        invocation.

        An `invocation_id` of your own makes it the same invocation however often it is asked for.
        One that has failed is run again by asking with a new `execution_id` as well.
        """
        body = invoke_body(
            self.id,
            function,
            code,
            command,
            language,
            input,
            content_type,
            timeout,
            metadata,
            invocation_id,
            execution_id,
            stdin,
            stdin_open,
            env,
            args,
            cwd,
        )
        async with _within(wait):
            return await self._invoke(body, idempotency_key, mode)

    async def interactive(
        self,
        command: Sequence[str] | None = None,
        *,
        rows: int | None = None,
        cols: int | None = None,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncExecution:
        """
        Start a command (a shell, if none is given) to talk with: see `execution.console()`.

        With `rows` and `cols` it runs on a terminal of that size, otherwise on pipes whose input
        stays open. `timeout` is in seconds; without, it may take as long as the server allows.
        """
        terminal = None if rows is None or cols is None else {"rows": rows, "cols": cols}
        check_string_list(command=command)
        check_string_dict(env=env)
        check_string(cwd=cwd)
        check_numbers(rows=rows, cols=cols, timeout=timeout)
        body = {
            "session_id": self._info.id,
            "mode": "console",
            "command": list(command or shell(on_terminal=terminal is not None)),
            "terminal": terminal,
            "stdin_open": terminal is None,
            "timeout_ms": None if timeout is None else round(timeout * 1000),
            "env": dict(env) if env else None,
            "cwd": cwd,
        }
        given = {name: value for name, value in body.items() if value is not None}
        return (await self._invoke(given, idempotency_key, "async")).execution

    def context(
        self,
        language: str = "python",
        *,
        cwd: str | None = None,
        idempotency_key: str | None = None,
    ) -> Pending[AsyncContext]:
        """
        A new context, whose runs find what earlier ones left behind; python is the only `language`
        that has them. It begins in `cwd`, by default the workspace. A `with` block deletes it at
        its end.
        """
        return Pending("session.context", self._new_context(language, cwd, idempotency_key))

    async def _new_context(self, language: str, cwd: str | None, key: str | None) -> AsyncContext:
        check_string(language=language, cwd=cwd)
        body = {"language": language, **({} if cwd is None else {"cwd": cwd})}
        path = f"{self._path}/contexts"
        creation = self._http.call_once(path, key=key or new_key(), body=body)
        answer = await undo_if_cancelled(creation, lambda answer: self._context(answer).delete())
        return AsyncContext(self._http, self, decode(ContextInfo, answer), scoped=True)

    async def contexts(self) -> AsyncIterator[AsyncContext]:
        """The contexts that it has, oldest first."""
        async for item in self._http.pages(f"{self._path}/contexts"):
            yield self._context(item)

    async def get_context(self, context_id: str) -> AsyncContext:
        """The context with this id; raises `NotFound` when there is none, or no more."""
        path = f"{self._path}/contexts/{url_segment(context_id)}"
        return self._context(await self._http.call("GET", path))

    def execution(self, execution_id: str) -> AsyncExecution:
        """The handle of an execution known by its id; the server is not asked."""
        return AsyncExecution(self._http, execution_id)

    async def executions(self, *, status: str | None = None) -> AsyncIterator[ExecutionInfo]:
        """What was run in it, newest first."""
        async for item in self._http.pages(f"{self._path}/executions", {"status": status}):
            yield decode(ExecutionInfo, item)

    async def artifacts(self) -> AsyncIterator[Artifact]:
        """
        The files that its executions made or changed, by path, each as it was last; for
        `files.download`. They may have been removed since.
        """
        async for item in self._http.pages(f"{self._path}/artifacts"):
            yield decode(Artifact, item)

    async def checkpoint(self) -> Checkpoint:
        """Save its files now; that is done when this returns."""
        answer = await self._http.call(
            "POST", f"{self._path}/checkpoint", wait=_SAVE_WAIT, once=True
        )
        return decode(Checkpoint, answer)

    async def last_checkpoint(self) -> Checkpoint | None:
        """The last time that its files were saved; also after its end, for a while."""
        try:
            return decode(Checkpoint, await self._http.call("GET", f"{self._path}/checkpoint"))
        except NotFound as error:
            if error.code != "checkpoint_not_found":
                raise
            return None

    async def processes(self) -> list[ProcessInfo]:
        """What its executions left running in the background."""
        answer = await self._http.call("GET", f"{self._path}/processes")
        return [decode(ProcessInfo, item) for item in answer["items"]]

    async def end_processes(self) -> list[ProcessInfo]:
        """End those, with everything they started; what they were."""
        answer = await self._http.call("DELETE", f"{self._path}/processes")
        return [decode(ProcessInfo, item) for item in answer["items"]]

    async def dependencies(self) -> Packages:
        """Its own Python packages: what was asked for, what is installed, or how far that is."""
        answer = await self._http.call("GET", f"{self._path}/dependencies")
        return decode(Packages, answer)

    async def install(
        self,
        dependencies: str | Sequence[str | Mapping[str, str]],
        *,
        timeout: int | None = None,
        allow_version_conflicts: bool = False,
    ) -> Packages:
        """
        Add Python packages, such as "requests" or ["numpy", "pandas>=2,<3"], and wait for that, at
        most `timeout` seconds (300). What runs afterwards finds them. When it fails it raises, and
        the session keeps what it has.
        """
        check_numbers(timeout=timeout)
        body = {
            "dependencies": dependencies_body(dependencies),
            "install_timeout": timeout or INSTALL_TIMEOUT,
            "allow_version_conflicts": allow_version_conflicts,
        }
        answer = await self._http.call(
            "POST",
            f"{self._path}/dependencies",
            body=body,
            wait=float(timeout or INSTALL_TIMEOUT),
            once=True,
        )
        return decode(Packages, answer)

    async def install_log(self) -> str:
        """What the last installation printed, while it goes on too."""
        path = f"{self._path}/dependencies/log"
        async with self._http.stream("GET", path) as response:
            return (await response.aread()).decode("utf-8", "replace")

    async def refresh(self) -> SessionInfo:
        """Ask the server how it is."""
        self._info = decode(SessionInfo, await self._http.call("GET", self._path))
        return self._info

    async def start(self, *, wait: float | None = None) -> SessionInfo:
        """
        Have it run: with its files from the node or from the archive, or from where it was paused.
        What is run in it does that by itself, unless `auto_start` is False.

        This and the others of its kind wait until the session is so, at most `wait` seconds; the
        `status` says what it is then. The server goes on with it in any case.
        """
        return await self._become("start", wait)

    async def stop(self, *, wait: float | None = None) -> SessionInfo:
        """
        End what runs in it and give back its memory; its files stay on its node. Its life does not
        go on until it is started again, which begins a new one.
        """
        return await self._become("stop", wait)

    async def archive(self, *, wait: float | None = None) -> SessionInfo:
        """Stop it, and have its files in the blob store alone, where any node can start it from."""
        return await self._become("archive", wait)

    async def pause(self, *, wait: float | None = None) -> SessionInfo:
        """
        Let it stand still with its memory, contexts and processes; it uses no CPU time. Raises
        `Conflict` with the code `session_busy` while an execution is under way. Its life goes on.
        """
        return await self._become("pause", wait)

    async def resume(self, *, wait: float | None = None) -> SessionInfo:
        """The same as `start`."""
        return await self._become("resume", wait)

    async def update(
        self,
        *,
        timeout: int | None = None,
        cpu: str | float | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        max_processes: int | None = None,
        env: Mapping[str, str | None] | None = None,
        labels: Mapping[str, str | None] | None = None,
        auto_start: bool | None = None,
        idle_timeout: int | None = None,
        archive_after: int | None = None,
        delete_after: int | None = None,
    ) -> SessionInfo:
        """
        Change what is given and leave the rest: see `sessions.create`. `timeout` gives it so many
        seconds of life from now on. `env` and `labels` are added to what it has; None removes one.
        New limits count at once, variables for what is run next. 0 is never for the last three.
        """
        body = change_body(
            timeout=timeout,
            cpu=cpu,
            memory=memory,
            disk=disk,
            max_processes=max_processes,
            env=env,
            labels=labels,
            auto_start=auto_start,
            idle_timeout=idle_timeout,
            archive_after=archive_after,
            delete_after=delete_after,
        )
        answer = await self._http.call("PATCH", self._path, body=body)
        self._info = decode(SessionInfo, answer)
        return self._info

    async def extend(self, seconds: int) -> SessionInfo:
        """Give it so many seconds of life from now on."""
        return await self.update(timeout=seconds)

    async def clone(
        self,
        *,
        timeout: int | None = None,
        cpu: str | float | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        max_processes: int | None = None,
        env: Mapping[str, str | None] | None = None,
        labels: Mapping[str, str | None] | None = None,
        auto_start: bool | None = None,
        idle_timeout: int | None = None,
        archive_after: int | None = None,
        delete_after: int | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncSession:
        """
        A new session as this one is, but for what is given (see `update`), with a copy of its
        files as they are now. Memory, processes and executions are not copied.
        """
        body = change_body(
            timeout=timeout,
            cpu=cpu,
            memory=memory,
            disk=disk,
            max_processes=max_processes,
            env=env,
            labels=labels,
            auto_start=auto_start,
            idle_timeout=idle_timeout,
            archive_after=archive_after,
            delete_after=delete_after,
        )
        path = f"{self._path}/clone"
        creation = self._http.call_once(
            path, key=idempotency_key or new_key(), body=body, wait=_SAVE_WAIT
        )
        answer = await undo_if_cancelled(creation, lambda answer: self._cloned(answer).delete())
        return self._cloned(answer)

    async def delete(self) -> SessionInfo:
        """End it; its record and the results stay readable. Doing so again changes nothing."""
        self._deleted = True
        self._info = decode(SessionInfo, await self._http.call("DELETE", self._path))
        return self._info

    async def _become(self, verb: str, wait: float | None) -> SessionInfo:
        answer = await request_state(self._http, self._path, verb, wait)
        self._info = decode(SessionInfo, answer)
        return self._info

    def _cloned(self, answer: Any) -> AsyncSession:
        return AsyncSession(self._http, decode(SessionInfo, answer))

    def _context(self, answer: Any) -> AsyncContext:
        return AsyncContext(self._http, self, decode(ContextInfo, answer))

    async def _run(
        self,
        body: dict[str, Any],
        key: str | None,
        callbacks: Callbacks,
        wait: float | None = None,
    ) -> Result:
        if callbacks:
            execution = await self._submit(body, key)
            return await _to_the_end(execution, follow(execution, callbacks))
        first = _FIRST_WAIT if wait is None else min(_FIRST_WAIT, wait)
        answer = await undo_if_cancelled(self._execute(body, key, first), self._cancel)
        if answer["status"] != "submitted":
            return decode(Result, answer)
        execution = AsyncExecution(self._http, answer["execution_id"])
        return await _to_the_end(execution, execution.wait())

    async def _invoke(self, body: dict[str, Any], key: str | None, mode: str) -> AsyncInvocation:
        async def undo(answer: Any) -> None:
            await AsyncInvocation(self._http, decode(InvocationInfo, answer)).cancel(_LEFT)

        answer = await undo_if_cancelled(self._once("invocations", body, key), undo)
        invocation = AsyncInvocation(self._http, decode(InvocationInfo, answer))
        if mode == "sync":
            await _to_the_end(invocation, invocation.wait())
        return invocation

    async def _submit(self, body: dict[str, Any], key: str | None) -> AsyncExecution:
        answer = await undo_if_cancelled(self._execute(body, key), self._cancel)
        return AsyncExecution(self._http, answer["execution_id"])

    async def _execute(self, body: dict[str, Any], key: str | None, wait: float = 0.0) -> Any:
        return await self._once(f"{self._path}/execute", body, key, wait)

    async def _once(
        self, path: str, body: dict[str, Any], key: str | None, wait: float = 0.0
    ) -> Any:
        """Without a key it gets an id, which costs the server nothing, so it may be sent again."""
        if key is None and "execution_id" not in body and "invocation_id" not in body:
            body = {**body, "execution_id": ids.execution_id(datetime.now(UTC))}
        # In a header: how long this client waits is no part of the request that a key stands for.
        headers = {"prefer": f"wait={wait:g}"} if wait else {}
        return await self._http.call_once(path, key=key, body=body, headers=headers, wait=wait)

    async def _cancel(self, answer: Any) -> None:
        if answer["status"] == "submitted":
            await AsyncExecution(self._http, answer["execution_id"]).cancel(_LEFT)


def shell(*, on_terminal: bool) -> list[str]:
    """The best shell that the sandbox has."""
    options = " -il" if on_terminal else ""
    line = f"command -v bash >/dev/null 2>&1 && exec bash{options}; exec sh{options[:-1]}"
    return ["sh", "-c", line]


async def _to_the_end(
    work: AsyncExecution | AsyncInvocation, waiting: Coroutine[None, None, Result]
) -> Result:
    try:
        return await waiting
    except BaseException:
        # Nobody will come for it: the caller was cancelled, a callback failed, the server is lost.
        await best_effort(work.cancel(_LEFT))
        raise


@asynccontextmanager
async def _within(wait: float | None) -> AsyncIterator[None]:
    """Cancels what is done in it after so many seconds."""
    check_numbers(wait=wait)
    limit = asyncio.timeout(wait)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(f"It did not end within {wait:g} s, and was cancelled.") from None
