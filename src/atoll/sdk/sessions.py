"""Sessions: making, finding and ending them, and running code in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.errors import InvalidRequest, NotFound
from atoll.sdk.contexts import AsyncContext
from atoll.sdk.decode import decode
from atoll.sdk.executions import AsyncExecution, execute_body, follow
from atoll.sdk.files import AsyncFiles
from atoll.sdk.paths import segment
from atoll.sdk.patience import quietly, undoable
from atoll.sdk.values import ContextInfo, ExecutionInfo, ProcessInfo, Result, SessionInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence

    from atoll.sdk.connection import Connection
    from atoll.sdk.executions import DisplayCallback, OutputCallback

# Short executions are answered by the request that submits them. It must not wait much longer: only
# its answer tells the id, without which an execution cannot be cancelled.
_FIRST_WAIT = 1.0


class AsyncSession:
    """A sandbox that lives until it is deleted or its time is over."""

    def __init__(self, connection: Connection, info: SessionInfo) -> None:
        self._connection = connection
        self._info = info
        self._path = f"sessions/{segment(info.id)}"
        self._files = AsyncFiles(connection, self._path)

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

    def __repr__(self) -> str:
        return f"<Session {self._info.id} {self._info.status}>"

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
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
        idempotency_key: str | None = None,
    ) -> Result:
        """
        Run `code` in a `language` (python, javascript, shell) or a `command`, and wait for its end.

        Python code that defines `handler` has it called with `event`; what it returns is the
        result's `return_value`. `timeout` is in seconds. Output is handed to the callbacks as it
        comes. A program that fails is a result, not an exception: see `Result.ok` and
        `Result.check`. When the call itself is cancelled, so is the execution.

        With an `idempotency_key` it is run once, however often it is asked for: by this call, which
        then survives a connection that breaks, and by others with the same key and arguments.
        """
        body = execute_body(code, language, command, event, timeout, stdin, env, args, cwd)
        return await self._run(body, idempotency_key, on_stdout, on_stderr)

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
        idempotency_key: str | None = None,
    ) -> AsyncExecution:
        """Like `run`, without waiting for anything but the server's word that it will be run."""
        body = execute_body(code, language, command, event, timeout, stdin, env, args, cwd)
        return await self._submit(body, idempotency_key)

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
        if isinstance(command, str):
            raise InvalidRequest("command is a list of strings.", field="command")
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
        if idempotency_key is None:
            submission = self._connection.call("POST", "invocations", body=given)
        else:
            submission = self._connection.call_once("invocations", key=idempotency_key, body=given)

        async def cancel(answer: Any) -> None:
            await AsyncExecution(self._connection, answer["execution_id"]).cancel()

        answer = await undoable(submission, cancel)
        return AsyncExecution(self._connection, answer["execution_id"])

    async def context(
        self,
        language: str = "python",
        *,
        cwd: str | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncContext:
        """
        A new context, whose runs find what earlier ones left behind; python is the only `language`
        that has them. It begins in `cwd`, by default the workspace.
        """
        body = {"language": language, **({} if cwd is None else {"cwd": cwd})}
        path = f"{self._path}/contexts"
        if idempotency_key is None:
            creation = self._connection.call("POST", path, body=body)
        else:
            creation = self._connection.call_once(path, key=idempotency_key, body=body)
        answer = await undoable(creation, lambda answer: self._context(answer).delete())
        return self._context(answer)

    async def contexts(self) -> AsyncIterator[AsyncContext]:
        """The contexts that it has, oldest first."""
        async for item in self._connection.pages(f"{self._path}/contexts"):
            yield self._context(item)

    async def get_context(self, context_id: str) -> AsyncContext:
        """The context with this id; raises `NotFound` when there is none, or no more."""
        path = f"{self._path}/contexts/{segment(context_id)}"
        return self._context(await self._connection.call("GET", path))

    def execution(self, execution_id: str) -> AsyncExecution:
        """The handle of an execution known by its id; the server is not asked."""
        return AsyncExecution(self._connection, execution_id)

    async def executions(self) -> AsyncIterator[ExecutionInfo]:
        """What was run in it, newest first."""
        async for item in self._connection.pages(f"{self._path}/executions"):
            yield decode(ExecutionInfo, item)

    async def processes(self) -> list[ProcessInfo]:
        """What its executions left running in the background."""
        answer = await self._connection.call("GET", f"{self._path}/processes")
        return [decode(ProcessInfo, item) for item in answer["items"]]

    async def end_processes(self) -> list[ProcessInfo]:
        """End those, with everything they started; what they were."""
        answer = await self._connection.call("DELETE", f"{self._path}/processes")
        return [decode(ProcessInfo, item) for item in answer["items"]]

    async def refresh(self) -> SessionInfo:
        """Ask the server how it is."""
        self._info = decode(SessionInfo, await self._connection.call("GET", self._path))
        return self._info

    async def delete(self) -> SessionInfo:
        """End it; its record and the results stay readable. Doing so again changes nothing."""
        self._info = decode(SessionInfo, await self._connection.call("DELETE", self._path))
        return self._info

    def _context(self, answer: Any) -> AsyncContext:
        return AsyncContext(self._connection, self, decode(ContextInfo, answer))

    async def _run(
        self,
        body: dict[str, Any],
        key: str | None,
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
        on_result: DisplayCallback | None = None,
    ) -> Result:
        if not (on_stdout is None and on_stderr is None and on_result is None):
            execution = await self._submit(body, key)
            return await _to_the_end(execution, follow(execution, on_stdout, on_stderr, on_result))
        answer = await undoable(self._execute(body, key, _FIRST_WAIT), self._cancel)
        if answer["status"] != "submitted":
            return decode(Result, answer)
        execution = AsyncExecution(self._connection, answer["execution_id"])
        return await _to_the_end(execution, execution.wait())

    async def _submit(self, body: dict[str, Any], key: str | None) -> AsyncExecution:
        answer = await undoable(self._execute(body, key), self._cancel)
        return AsyncExecution(self._connection, answer["execution_id"])

    async def _execute(self, body: dict[str, Any], key: str | None, wait: float = 0.0) -> Any:
        path, body = f"{self._path}/execute", {**body, "wait": wait} if wait else body
        if key is not None:
            return await self._connection.call_once(path, key=key, body=body, wait=wait)
        return await self._connection.call("POST", path, body=body, wait=wait)

    async def _cancel(self, answer: Any) -> None:
        if answer["status"] == "submitted":
            await AsyncExecution(self._connection, answer["execution_id"]).cancel()


class AsyncSessions:
    """All sessions of the server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def create(
        self,
        template: str | None = None,
        *,
        timeout: int | None = None,
        cpu: str | float | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        max_processes: int | None = None,
        env: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncSession:
        """
        A new session, ready to run code.

        `timeout` is its life in seconds. `cpu` is in cores (1, 0.5, "500m"), `memory` and `disk` in
        bytes or like "512Mi". What is left out comes from the template, and from the server's
        settings after that. With an `idempotency_key`, all calls with the same key and arguments
        give the same session, also those of other processes.
        """
        body = {
            "template_id": template,
            "timeout": timeout,
            "cpu": None if cpu is None else str(cpu),
            "memory": None if memory is None else str(memory),
            "disk": None if disk is None else str(disk),
            "max_processes": max_processes,
            "env_vars": dict(env) if env else None,
        }
        given = {name: value for name, value in body.items() if value is not None}
        if idempotency_key is None:
            creation = self._connection.call("POST", "sessions", body=given)
        else:
            creation = self._connection.call_once("sessions", key=idempotency_key, body=given)
        answer = await undoable(creation, lambda answer: self.delete(answer["id"]))
        return AsyncSession(self._connection, decode(SessionInfo, answer))

    async def get(self, session_id: str) -> AsyncSession:
        """The session with this id; raises `NotFound` when there is none."""
        answer = await self._connection.call("GET", f"sessions/{segment(session_id)}")
        return AsyncSession(self._connection, decode(SessionInfo, answer))

    async def list(
        self, *, status: str | None = None, template: str | None = None
    ) -> AsyncIterator[AsyncSession]:
        """Sessions, newest first, ended ones included; pages are fetched as they are needed."""
        query = {"status": status, "template_id": template}
        async for item in self._connection.pages("sessions", query):
            yield AsyncSession(self._connection, decode(SessionInfo, item))

    async def delete(self, session_id: str) -> SessionInfo:
        """End a session; its record and the results stay readable."""
        answer = await self._connection.call("DELETE", f"sessions/{segment(session_id)}")
        return decode(SessionInfo, answer)


def shell(*, on_terminal: bool) -> list[str]:
    """The best shell that the sandbox has."""
    options = " -il" if on_terminal else ""
    line = f"command -v bash >/dev/null 2>&1 && exec bash{options}; exec sh{options[:-1]}"
    return ["sh", "-c", line]


async def _to_the_end(execution: AsyncExecution, waiting: Coroutine[None, None, Result]) -> Result:
    try:
        return await waiting
    except BaseException:
        # Nobody will come for it: the caller was cancelled, a callback failed, the server is lost.
        await quietly(execution.cancel())
        raise


async def end(session: AsyncSession, error: BaseException | None) -> None:
    """Delete a session that is left with `error`, which must not be hidden by one of ours."""
    if error is not None:
        await quietly(session.delete())
        return
    try:
        await session.delete()
    except NotFound:
        return
