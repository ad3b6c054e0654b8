"""One session: run code in it, manage its files, and start, stop or change it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack

from atoll.errors import NotFound
from atoll.sdk.arguments import (
    check_number,
    check_string,
    check_string_dict,
    check_string_list,
    encode,
    given,
)
from atoll.sdk.callbacks import Callbacks
from atoll.sdk.contexts import AsyncContext
from atoll.sdk.decode import decode
from atoll.sdk.deletable import AsyncDeletable
from atoll.sdk.dependencies import INSTALL_TIMEOUT, packages
from atoll.sdk.execution_requests import CALLER_LEFT, ExecutionRequests, time_limit
from atoll.sdk.executions import AsyncExecution, execute_body
from atoll.sdk.files import AsyncFiles
from atoll.sdk.http_client import new_key
from atoll.sdk.interactive_help import SESSION_ALTERNATIVES, AttributeHints, show_options
from atoll.sdk.invocations import AsyncInvocation, invoke_body
from atoll.sdk.options import UPDATE_FIELDS
from atoll.sdk.paths import url_segment
from atoll.sdk.pending import Pending
from atoll.sdk.retry import best_effort, undo_if_cancelled
from atoll.sdk.secrets import AsyncSecrets
from atoll.sdk.state_requests import request_state
from atoll.sdk.values import (
    Artifact,
    Checkpoint,
    ContextInfo,
    Event,
    ExecutionInfo,
    Packages,
    ProcessInfo,
    Result,
    SessionInfo,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from atoll.sdk.callbacks import ApprovalCallback, EventCallback, OutputCallback
    from atoll.sdk.http_client import HttpClient
    from atoll.sdk.options import InvokeOptions, RunOptions, UpdateOptions

_SAVE_TIMEOUT = 600.0
"""Seconds beyond the usual timeout: a checkpoint takes longer the more data has changed."""


class AsyncSession(AsyncDeletable, AttributeHints):
    """
    A sandbox with its own files, processes and limits. It exists until you delete it or its
    lifetime ends; a `with` block deletes it at its end.

    A stopped or archived session keeps its files and uses neither memory nor CPU. Requests that
    need it start it again.
    """

    ALTERNATIVES = SESSION_ALTERNATIVES

    def __init__(
        self, http: HttpClient, info: SessionInfo, *, warns_if_unclosed: bool = False
    ) -> None:
        self._http = http
        self._info = info
        self._warns_if_unclosed = warns_if_unclosed
        self._path = f"sessions/{url_segment(info.id)}"
        self._requests = ExecutionRequests(http, self._path)
        self._files = AsyncFiles(http, self._path)
        self._secrets = AsyncSecrets(http, self._path)

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def info(self) -> SessionInfo:
        """The session as of the last response. Call `refresh` to update it."""
        return self._info

    @property
    def files(self) -> AsyncFiles:
        """Files of the workspace."""
        return self._files

    @property
    def secrets(self) -> AsyncSecrets:
        """Environment variables whose values the API never returns."""
        return self._secrets

    @property
    def _is_open(self) -> bool:
        # Sessions of an embedded server end with it.
        embedded = self._http.endpoint.url is None
        return not self._deleted and not (embedded and self._http.closed)

    def __repr__(self) -> str:
        return f"<Session {self._info.id} {self._info.status}>"

    @show_options
    async def run(
        self,
        code: str | None = None,
        *,
        wait: float | None = None,
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
        on_event: EventCallback | None = None,
        on_approval: ApprovalCallback | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[RunOptions],
    ) -> Result:
        """
        Run `code` in a `language` (python, javascript, shell), or a `command`, and wait for the
        result.

        If Python code defines `handler`, it is called with `event`, and its return value is the
        result's `return_value`. A program that fails does not raise: check `Result.ok`, or call
        `Result.check`.

        `timeout` limits how long the code runs, and `wait` how long this call waits, in seconds.
        After `wait` the call raises `TimeoutError`. If the call ends early for any reason
        (`wait`, cancellation, an error in a callback), the execution is cancelled.

        Callbacks receive events while the code runs: `on_stdout` and `on_stderr` text, `on_event`
        every `Event`. `on_approval` receives an `Approval` that the code requests; it returns
        True, False, an `Answer`, or None to leave the answer to someone else.

        The call survives lost connections and a server that is unavailable for less than 30 s.
        Calls with the same `execution_id` or `idempotency_key` run the code once.
        """
        body = execute_body(code, options)
        callbacks = Callbacks(on_stdout, on_stderr, on_event, on_approval)
        async with time_limit(wait):
            return await self._requests.run(body, idempotency_key, callbacks, wait)

    @show_options
    async def stream(
        self,
        code: str | None = None,
        *,
        idempotency_key: str | None = None,
        **options: Unpack[RunOptions],
    ) -> AsyncIterator[Event]:
        """
        Like `run`, but yields events while the code runs. The last event is the `result`.

        After a lost connection or a restart of the server the stream resumes without gaps or
        repeats. Leaving the iteration early cancels the execution; to leave it running, use
        `submit` and `events`. Each event has an `execution_id`: pass it to `execution` to send
        input meanwhile.
        """
        execution = await self._requests.submit(execute_body(code, options), idempotency_key)
        ended = False
        try:
            async for event in execution.events():
                ended = event.kind == "result"
                yield event
        finally:
            if not ended and not self._http.closed:
                await best_effort(execution.cancel(CALLER_LEFT))

    @show_options
    async def submit(
        self,
        code: str | None = None,
        *,
        idempotency_key: str | None = None,
        **options: Unpack[RunOptions],
    ) -> AsyncExecution:
        """
        Like `run`, but returns as soon as the server has accepted the execution. With
        `stdin_open`, standard input stays open after `stdin`, for `execution.write`.
        """
        return await self._requests.submit(execute_body(code, options), idempotency_key)

    @show_options
    async def invoke(
        self,
        function: str | None = None,
        *,
        input: Any = None,
        wait: float | None = None,
        mode: Literal["sync", "async"] = "sync",
        idempotency_key: str | None = None,
        **options: Unpack[InvokeOptions],
    ) -> AsyncInvocation:
        """
        Call a `function`: one that `code` defines, or `module:name` in the workspace. Without
        `function`, run `code` or a `command` as `run` does.

        The function receives `input`, a JSON value or bytes with a `content_type`. Its return value
        is the result's `return_value`. In mode `sync` the call waits for the result, at most `wait`
        seconds, as `run` does; in mode `async` it returns at once. `metadata` is stored with the
        invocation.

        Calls with the same `invocation_id` are the same invocation. To run a failed invocation
        again, call with its `invocation_id` and a new `execution_id`.
        """
        body = invoke_body(self.id, function, input, options)
        async with time_limit(wait):
            return await self._requests.invoke(body, idempotency_key, mode)

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
        Start an interactive command, by default a shell, and talk to it through
        `execution.console()`.

        With `rows` and `cols` it runs on a terminal of that size, otherwise on pipes with an open
        standard input. `timeout` is in seconds; by default the server's limit applies.
        """
        terminal = None if rows is None or cols is None else {"rows": rows, "cols": cols}
        check_string_list(command=command)
        check_string_dict(env=env)
        check_string(cwd=cwd)
        check_number(rows=rows, cols=cols, timeout=timeout)
        body = given(
            session_id=self._info.id,
            mode="console",
            command=list(command or shell(on_terminal=terminal is not None)),
            terminal=terminal,
            stdin_open=terminal is None,
            timeout_ms=None if timeout is None else round(timeout * 1000),
            env=dict(env) if env else None,
            cwd=cwd,
        )
        return (await self._requests.invoke(body, idempotency_key, "async")).execution

    def context(
        self,
        language: str = "python",
        *,
        cwd: str | None = None,
        idempotency_key: str | None = None,
    ) -> Pending[AsyncContext]:
        """
        Create a context: an interpreter that keeps its state between runs. The only `language` is
        python. It starts in `cwd`, by default the workspace. A `with` block deletes it at its end.
        """
        return Pending("session.context", self._create_context(language, cwd, idempotency_key))

    async def _create_context(
        self, language: str, cwd: str | None, key: str | None
    ) -> AsyncContext:
        check_string(language=language, cwd=cwd)
        body = {"language": language, **({} if cwd is None else {"cwd": cwd})}
        path = f"{self._path}/contexts"
        creation = self._http.call_once(path, key=key or new_key(), body=body)
        answer = await undo_if_cancelled(creation, lambda answer: self._context(answer).delete())
        return self._context(answer, warns_if_unclosed=True)

    async def contexts(self) -> AsyncIterator[AsyncContext]:
        """Contexts of the session, oldest first."""
        async for info in self._http.items(ContextInfo, f"{self._path}/contexts"):
            yield AsyncContext(self, info)

    async def get_context(self, context_id: str) -> AsyncContext:
        """The context with this id. Raises `NotFound` if it does not exist."""
        path = f"{self._path}/contexts/{url_segment(context_id)}"
        return AsyncContext(self, await self._http.fetch(ContextInfo, "GET", path))

    def execution(self, execution_id: str) -> AsyncExecution:
        """A handle for an execution with a known id. Sends no request."""
        return AsyncExecution(self._http, execution_id)

    def executions(self, *, status: str | None = None) -> AsyncIterator[ExecutionInfo]:
        """Executions in this session, newest first."""
        return self._http.items(ExecutionInfo, f"{self._path}/executions", {"status": status})

    def artifacts(self) -> AsyncIterator[Artifact]:
        """
        Files that executions created or changed, by path, each in its latest version. Download
        them with `files.download`. Some may have been removed since.
        """
        return self._http.items(Artifact, f"{self._path}/artifacts")

    async def checkpoint(self) -> Checkpoint:
        """Take a checkpoint of the workspace, and return when it is stored."""
        path = f"{self._path}/checkpoint"
        return await self._http.fetch(Checkpoint, "POST", path, wait=_SAVE_TIMEOUT, once=True)

    async def last_checkpoint(self) -> Checkpoint | None:
        """
        The latest checkpoint, or None. It stays available for some time after the session has
        ended.
        """
        try:
            return await self._http.fetch(Checkpoint, "GET", f"{self._path}/checkpoint")
        except NotFound as error:
            if error.code != "checkpoint_not_found":
                raise
            return None

    async def processes(self) -> list[ProcessInfo]:
        """Background processes that executions left running."""
        return [item async for item in self._http.items(ProcessInfo, f"{self._path}/processes")]

    async def end_processes(self) -> list[ProcessInfo]:
        """Kill the background processes with their children, and return them."""
        answer = await self._http.call("DELETE", f"{self._path}/processes")
        return [decode(ProcessInfo, item) for item in answer["items"]]

    async def dependencies(self) -> Packages:
        """Python packages of this session: requested, installed, and the installation's status."""
        return await self._http.fetch(Packages, "GET", f"{self._path}/dependencies")

    async def install(
        self,
        dependencies: str | Sequence[str | Mapping[str, str]],
        *,
        timeout: int | None = None,
        allow_version_conflicts: bool = False,
    ) -> Packages:
        """
        Install Python packages, such as `"requests"` or `["numpy", "pandas>=2,<3"]`, and wait for
        at most `timeout` seconds (300). Later executions can import them. If the installation
        fails, the call raises, and the installed packages stay as they were.
        """
        check_number(timeout=timeout)
        body = {
            "dependencies": packages("dependencies", dependencies),
            "install_timeout": timeout or INSTALL_TIMEOUT,
            "allow_version_conflicts": allow_version_conflicts,
        }
        return await self._http.fetch(
            Packages,
            "POST",
            f"{self._path}/dependencies",
            body=body,
            wait=float(timeout or INSTALL_TIMEOUT),
            once=True,
        )

    async def install_log(self) -> str:
        """Output of the latest installation, also while it is running."""
        path = f"{self._path}/dependencies/log"
        async with self._http.stream("GET", path) as response:
            return (await response.aread()).decode("utf-8", "replace")

    async def refresh(self) -> SessionInfo:
        """Fetch the current state of the session."""
        self._info = await self._http.fetch(SessionInfo, "GET", self._path)
        return self._info

    async def start(self, *, wait: float | None = None) -> SessionInfo:
        """
        Start the session: from its files on the node or in the archive, or from where it was
        paused. Running code starts it automatically, unless `auto_start` is False.

        This and the following methods wait until the session has reached the state, at most
        `wait` seconds; check the returned `status`. The server continues in any case.
        """
        return await self._request_state("start", wait)

    async def stop(self, *, wait: float | None = None) -> SessionInfo:
        """
        Stop the session and free its memory. Its files stay on its node. The next start begins a
        new lifetime.
        """
        return await self._request_state("stop", wait)

    async def archive(self, *, wait: float | None = None) -> SessionInfo:
        """Stop the session and move its files to the blob store. Any node can then start it."""
        return await self._request_state("archive", wait)

    async def pause(self, *, wait: float | None = None) -> SessionInfo:
        """
        Freeze the session with its memory, contexts and processes. It uses no CPU time, and its
        lifetime continues. Raises `Conflict` with the code `session_busy` while an execution is
        running.
        """
        return await self._request_state("pause", wait)

    async def resume(self, *, wait: float | None = None) -> SessionInfo:
        """Same as `start`."""
        return await self._request_state("resume", wait)

    @show_options
    async def update(self, **options: Unpack[UpdateOptions]) -> SessionInfo:
        """
        Change the given options and keep the others. `timeout` is a new lifetime from now on.
        `env` and `labels` are merged with the existing ones; a value of None removes one. New
        limits apply at once, new variables to later executions. For `idle_timeout`,
        `archive_after` and `delete_after`, 0 means never.
        """
        body = encode(options, UPDATE_FIELDS, call="update")
        self._info = await self._http.fetch(SessionInfo, "PATCH", self._path, body=body)
        return self._info

    async def extend(self, seconds: int) -> SessionInfo:
        """Set the remaining lifetime, counted from now."""
        return await self.update(timeout=seconds)

    @show_options
    async def clone(
        self, *, idempotency_key: str | None = None, **options: Unpack[UpdateOptions]
    ) -> AsyncSession:
        """
        Create a session with the same settings, except for the given options (see `update`), and
        with a copy of the current files. Memory, processes and executions are not copied.
        """
        body = encode(options, UPDATE_FIELDS, call="clone")
        creation = self._http.call_once(
            f"{self._path}/clone", key=idempotency_key or new_key(), body=body, wait=_SAVE_TIMEOUT
        )
        answer = await undo_if_cancelled(creation, lambda answer: self._cloned(answer).delete())
        return self._cloned(answer)

    async def delete(self) -> SessionInfo:
        """End the session. Its record and results stay readable. Idempotent."""
        self._deleted = True
        self._info = await self._http.fetch(SessionInfo, "DELETE", self._path)
        return self._info

    async def _request_state(self, verb: str, wait: float | None) -> SessionInfo:
        answer = await request_state(self._http, self._path, verb, wait)
        self._info = decode(SessionInfo, answer)
        return self._info

    def _cloned(self, answer: Any) -> AsyncSession:
        return AsyncSession(self._http, decode(SessionInfo, answer))

    def _context(self, answer: Any, *, warns_if_unclosed: bool = False) -> AsyncContext:
        info = decode(ContextInfo, answer)
        return AsyncContext(self, info, warns_if_unclosed=warns_if_unclosed)


def shell(*, on_terminal: bool) -> list[str]:
    """A command that runs bash if the sandbox has it, else sh."""
    options = " -il" if on_terminal else ""
    line = f"command -v bash >/dev/null 2>&1 && exec bash{options}; exec sh{options[:-1]}"
    return ["sh", "-c", line]
