"""
The same client for ordinary code: `Atoll`.

Written by scripts/generate-sync from the asynchronous classes; change those. Objects may be used
from several threads, and from code that runs inside an event loop, which they then block.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Literal, Self, overload

from atoll.sdk.attribute_hints import CLIENT_ALTERNATIVES, SESSION_ALTERNATIVES, AttributeHints
from atoll.sdk.client import AsyncAtoll
from atoll.sdk.event_loop_thread import EventLoopThread

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from atoll.sdk.callbacks import ApprovalCallback, DisplayCallback, EventCallback, OutputCallback
    from atoll.sdk.consoles import AsyncConsole
    from atoll.sdk.contexts import AsyncContext
    from atoll.sdk.events import AsyncEvents
    from atoll.sdk.executions import AsyncExecution, AsyncExecutions
    from atoll.sdk.file_transfer import ProgressCallback, Source
    from atoll.sdk.files import AsyncFiles
    from atoll.sdk.invocations import AsyncInvocation, AsyncInvocations
    from atoll.sdk.nodes import AsyncNodes
    from atoll.sdk.pools import AsyncPools
    from atoll.sdk.secrets import AsyncSecrets
    from atoll.sdk.session import AsyncSession
    from atoll.sdk.sessions import AsyncSessions
    from atoll.sdk.templates import AsyncTemplates
    from atoll.sdk.values import (
        Answer,
        Approval,
        Artifact,
        BuildEvent,
        Checkpoint,
        ConsoleEvent,
        ConsoleExit,
        ContextInfo,
        Entry,
        Event,
        ExecutionInfo,
        FeedEvent,
        FileEvent,
        InvocationInfo,
        Link,
        Match,
        Mount,
        NodeHealth,
        NodeInfo,
        NodeMetrics,
        Packages,
        PoolInfo,
        ProcessInfo,
        Result,
        SessionInfo,
        Status,
        TemplateInfo,
        Tree,
        VolumeInfo,
        WebhookInfo,
        WebhookTest,
    )
    from atoll.sdk.volumes import AsyncVolumes
    from atoll.sdk.webhooks import AsyncWebhooks


class Console:
    """One who watches an execution; the first of them types, and the next when that one leaves."""

    def __init__(self, inner: AsyncConsole, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    @property
    def typing(self) -> bool:
        """Whether this one may type."""
        return self._async.typing

    @property
    def status(self) -> str:
        """Where the execution is, as far as was heard."""
        return self._async.status

    @property
    def terminal(self) -> bool:
        """Whether the execution runs on a terminal, and not on pipes."""
        return self._async.terminal

    def send(self, data: str | bytes, *, eof: bool = False) -> None:
        """
        Input, when the execution has begun; `eof` says that no more will come. What cannot be taken
        is told by an event of kind `error`: `console_taken` while somebody else types.
        """
        self._loop_thread.call(self._async.send, data, eof=eof)

    def resize(self, rows: int, cols: int) -> None:
        """The size of the terminal, which is that of the one who types."""
        self._loop_thread.call(self._async.resize, rows, cols)

    def signal(self, name: str) -> None:
        """A signal (INT, TERM, HUP, …) to what is in the foreground of the terminal."""
        self._loop_thread.call(self._async.signal, name)

    def end(self) -> None:
        """Cancel the execution; what is left of its output and its exit still come."""
        self._loop_thread.call(self._async.end)

    def __iter__(self) -> Iterator[ConsoleEvent]:
        """What happens, from what is left of the output on; the last one is the `exit`."""
        yield from self._loop_thread.iterate(self._async.__aiter__())

    def wait(self) -> ConsoleExit:
        """How it ended, when it has; what nobody has iterated over is passed by."""
        return self._loop_thread.call(self._async.wait)


class Execution:
    """A handle on one execution; it is valid as long as the server keeps the record."""

    def __init__(self, inner: AsyncExecution, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    @property
    def id(self) -> str:
        return self._async.id

    def __repr__(self) -> str:
        return repr(self._async)

    def info(self) -> ExecutionInfo:
        """The whole record, with what is known of each artifact."""
        return self._loop_thread.call(self._async.info)

    def status(self) -> Status:
        return self._loop_thread.call(self._async.status)

    def result(self) -> Result:
        """The result; raises `Conflict` with code `execution_not_finished` when it is too early."""
        return self._loop_thread.call(self._async.result)

    def artifacts(self) -> list[Artifact]:
        """The files that it made or changed."""
        return self._loop_thread.call(self._async.artifacts)

    def download(
        self,
        artifact: str | Artifact,
        target: str | os.PathLike[str],
        *,
        progress: ProgressCallback | None = None,
    ) -> Path:
        """Copy one of its artifacts, as it is now, to this machine; see `files.download`."""
        return self._loop_thread.call(self._async.download, artifact, target, progress=progress)

    def wait(self, wait: float | None = None) -> Result:
        """The result when it is there; raises `TimeoutError` after `wait` seconds, and the
        execution goes on. A server that is started again meanwhile is waited for."""
        return self._loop_thread.call(self._async.wait, wait)

    def events(self, after: int = 0) -> Iterator[Event]:
        """Everything that happened and happens to it, from behind the event with the sequence
        `after` on, live; ends after the `result`. A connection that is lost is taken up again where
        it broke: nothing is left out or told twice. Leaving it early changes nothing."""
        yield from self._loop_thread.iterate(self._async.events(after))

    def cancel(self, reason: str | None = None) -> Status:
        """End it: SIGTERM, and SIGKILL after a grace. One that has ended already stays as it is,
        which is no error: the status says how it ended."""
        return self._loop_thread.call(self._async.cancel, reason)

    def approval(self) -> Approval | None:
        """The question that it waits to be answered."""
        return self._loop_thread.call(self._async.approval)

    def approve(self, answer: Any = None, *, approval_id: str | None = None) -> Status:
        """Say yes to its question, with any JSON value. Raises `Conflict`: `no_approval` when it
        asks nothing, or not what `approval_id` names, `already_answered` when somebody else did."""
        return self._loop_thread.call(self._async.approve, answer, approval_id=approval_id)

    def refuse(self, reason: str | None = None, *, approval_id: str | None = None) -> Status:
        """Say no to its question; otherwise like `approve`."""
        return self._loop_thread.call(self._async.refuse, reason, approval_id=approval_id)

    def answer(self, answer: Answer, *, approval_id: str | None = None) -> Status:
        """What `approve` and `refuse` do. A question that is named by its id may be news that the
        server has yet to hear itself, and is given two seconds to get there."""
        return self._loop_thread.call(self._async.answer, answer, approval_id=approval_id)

    def send(self, message: str) -> Status:
        """Give it a message, which the code reads with `atoll_session.messages()`. Raises
        `Conflict` (`execution_not_running`) unless it runs, and `TemporaryError` (`queue_full`)
        when it leaves too many unread."""
        return self._loop_thread.call(self._async.send, message)

    def write(self, data: str | bytes, *, eof: bool = False) -> Status:
        """More for its stdin, which was submitted with `stdin_open`; `eof` closes it behind that.
        Waits up to 30 s while the code does not read. Raises `Conflict`: `execution_not_running`,
        `stdin_closed`."""
        return self._loop_thread.call(self._async.write, data, eof=eof)

    @contextmanager
    def console(self, *, watch: bool = False) -> Iterator[Console]:
        """Its terminal, or its pipes, for the length of an `with`; it goes on after that.
        With `watch` this one never types, and takes nobody's turn to."""
        with self._loop_thread.context(self._async.console(watch=watch)) as value:
            yield Console(value, self._loop_thread)


class Executions:
    """All executions of the server."""

    def __init__(self, inner: AsyncExecutions, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    def list(
        self,
        *,
        session_id: str | None = None,
        invocation_id: str | None = None,
        status: str | None = None,
    ) -> Iterator[ExecutionInfo]:
        """Executions, newest first, of all sessions, or of one session or one invocation; pages
        are fetched as they are needed."""
        yield from self._loop_thread.iterate(
            self._async.list(session_id=session_id, invocation_id=invocation_id, status=status)
        )


class Invocation:
    """One request to run something, and its executions."""

    def __init__(self, inner: AsyncInvocation, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    @property
    def id(self) -> str:
        return self._async.id

    @property
    def info(self) -> InvocationInfo:
        """As of the last answer about it; `refresh` asks again."""
        return self._async.info

    @property
    def status(self) -> str:
        """accepted, running, succeeded, failed or cancelled, as of the last answer about it."""
        return self._async.status

    @property
    def execution(self) -> Execution:
        """Of its executions, the latest: to follow, to cancel, to talk to."""
        return Execution(self._async.execution, self._loop_thread)

    def __repr__(self) -> str:
        return repr(self._async)

    def refresh(self) -> InvocationInfo:
        """Ask the server how it is."""
        return self._loop_thread.call(self._async.refresh)

    def result(self) -> Result:
        """The result; raises `Conflict` with code `execution_not_finished` when it is too early."""
        return self._loop_thread.call(self._async.result)

    def wait(self, wait: float | None = None) -> Result:
        """The result when it is there; raises `TimeoutError` after `wait` seconds, and the
        invocation goes on. A server that is started again meanwhile is waited for."""
        return self._loop_thread.call(self._async.wait, wait)

    def executions(self) -> Iterator[ExecutionInfo]:
        """Its executions, newest first."""
        yield from self._loop_thread.iterate(self._async.executions())

    def cancel(self, reason: str | None = None) -> InvocationInfo:
        """End it, whichever execution it is in; one that has ended already stays as it is, which is
        no error."""
        return self._loop_thread.call(self._async.cancel, reason)


class Invocations:
    """All invocations of the server; new ones are made by `session.invoke`."""

    def __init__(self, inner: AsyncInvocations, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    def get(self, invocation_id: str) -> Invocation:
        """The invocation with this id; raises `NotFound` when there is none."""
        return Invocation(self._loop_thread.call(self._async.get, invocation_id), self._loop_thread)

    def list(
        self, *, session_id: str | None = None, status: str | None = None
    ) -> Iterator[Invocation]:
        """Invocations, newest first; pages are fetched as they are needed. One that has just begun
        to run may be listed as `accepted`."""
        for item in self._loop_thread.iterate(
            self._async.list(session_id=session_id, status=status)
        ):
            yield Invocation(item, self._loop_thread)


class Files:
    """The workspace of a session."""

    def __init__(self, inner: AsyncFiles, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    def write(
        self,
        path: str,
        data: bytes | str,
        *,
        mode: int | None = None,
        overwrite: bool = True,
        if_match: str | None = None,
    ) -> Entry:
        """
        Make or replace a file, and the directories it lies in; text is written as UTF-8.

        `mode` is like 0o755. Without `overwrite` it must be new, with `if_match` it must be the
        version with that `etag`; else a `RequestError` (`precondition_failed`) is raised.
        """
        return self._loop_thread.call(
            self._async.write, path, data, mode=mode, overwrite=overwrite, if_match=if_match
        )

    def read(self, path: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """
        The content, or of it what a slice from `start` to `stop` has; a negative `start` counts
        from the end.
        """
        return self._loop_thread.call(self._async.read, path, start=start, stop=stop)

    def read_text(self, path: str, encoding: str = "utf-8") -> str:
        """The content as text."""
        return self._loop_thread.call(self._async.read_text, path, encoding)

    def stream(self, path: str, *, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The content in pieces, as they come; otherwise like `read`."""
        yield from self._loop_thread.iterate(self._async.stream(path, start=start, stop=stop))

    def list(
        self, path: str = "", *, recursive: bool = False, glob: str | None = None
    ) -> Iterator[Entry]:
        """
        What lies in a directory, by name; pages are fetched as they are needed.

        With `recursive` all that is beneath it, with `glob` what matches that, relative to `path`:
        `*`, `?` and `[…]` within a name, `**` for any directories.
        """
        yield from self._loop_thread.iterate(self._async.list(path, recursive=recursive, glob=glob))

    def search(
        self,
        query: str,
        path: str = "",
        *,
        regex: bool = False,
        ignore_case: bool = False,
        glob: str | None = None,
    ) -> Iterator[Match]:
        """
        Lines of text files beneath a directory that hold `query`, or match it as a regular
        expression; the first match of each line. `glob` is as for `list`.
        """
        yield from self._loop_thread.iterate(
            self._async.search(query, path, regex=regex, ignore_case=ignore_case, glob=glob)
        )

    def watch(self, path: str = "", *, recursive: bool = True) -> Iterator[FileEvent]:
        """
        What happens in a directory and beneath it, from the first event (`watching`) on, until the
        directory is gone. A connection that is lost is made again, and `overflow` told: something
        may have happened meanwhile.
        """
        yield from self._loop_thread.iterate(self._async.watch(path, recursive=recursive))

    def stat(self, path: str) -> Entry:
        """What it is; raises `NotFound` when there is nothing."""
        return self._loop_thread.call(self._async.stat, path)

    def exists(self, path: str) -> bool:
        """Whether there is something of this name."""
        return self._loop_thread.call(self._async.exists, path)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or an empty directory; with `recursive` a directory and all in it."""
        self._loop_thread.call(self._async.remove, path, recursive=recursive)

    def mkdir(self, path: str, *, parents: bool = True) -> Entry:
        """Make a directory; without `parents` what it lies in must be there, and it must not."""
        return self._loop_thread.call(self._async.mkdir, path, parents=parents)

    def move(self, source: str, target: str, *, overwrite: bool = False) -> Entry:
        """Give it another name; what has that name is replaced only with `overwrite`."""
        return self._loop_thread.call(self._async.move, source, target, overwrite=overwrite)

    def copy(self, source: str, target: str, *, overwrite: bool = False) -> Entry:
        """Copy a file, or a directory with all in it, within the session."""
        return self._loop_thread.call(self._async.copy, source, target, overwrite=overwrite)

    def chmod(self, path: str, mode: int) -> Entry:
        """Set its mode, like 0o755."""
        return self._loop_thread.call(self._async.chmod, path, mode)

    def presign(
        self,
        path: str,
        *,
        method: Literal["GET", "PUT"] = "GET",
        expires_in: int = 3600,
        filename: str | None = None,
        direct: bool = False,
    ) -> Link:
        """
        A link by which whoever has it can read (`GET`) or write (`PUT`) this one file for
        `expires_in` seconds, without a key. It cannot be revoked. A download is called `filename`.
        `direct` lets a PUT go straight to the blob store, if that can; see `Link.complete_url`.
        """
        return self._loop_thread.call(
            self._async.presign,
            path,
            method=method,
            expires_in=expires_in,
            filename=filename,
            direct=direct,
        )

    def upload(
        self,
        source: Source,
        path: str | None = None,
        *,
        mode: int | None = None,
        overwrite: bool = True,
        progress: ProgressCallback | None = None,
    ) -> Entry:
        """
        Copy a file of this machine to `path`, by default under its own name. `source` is its path,
        or an open binary file, or bytes, or an iterator of bytes; these need a `path`, are read in
        another thread and not closed.

        `progress` is called with the bytes sent so far and, if it is known, of all.
        """
        return self._loop_thread.call(
            self._async.upload, source, path, mode=mode, overwrite=overwrite, progress=progress
        )

    @overload
    def download(
        self,
        path: str | Artifact,
        target: str | os.PathLike[str],
        *,
        progress: ProgressCallback | None = None,
    ) -> Path: ...

    @overload
    def download(
        self, path: str | Artifact, target: IO[bytes], *, progress: ProgressCallback | None = None
    ) -> None: ...

    def download(
        self,
        path: str | Artifact,
        target: str | os.PathLike[str] | IO[bytes],
        *,
        progress: ProgressCallback | None = None,
    ) -> Path | None:
        """
        Copy a file to this machine: into `target` if that is a directory or ends with `/`, else
        under that name, and say where to; or into an open binary file, which is not closed. A line
        that breaks is taken up where it broke, unless the file is no longer the same: `Conflict`
        (`file_changed`).
        """
        function: Any = self._async.download
        value: Path | None = self._loop_thread.call(function, path, target, progress=progress)
        return value

    def upload_tree(
        self,
        source: str | os.PathLike[str],
        path: str = "",
        *,
        progress: ProgressCallback | None = None,
    ) -> Tree:
        """
        Copy what is in a directory of this machine into the directory `path`, which is made: all of
        it, or nothing. Directories are merged, files replace files. Links and modes are kept;
        pipes, sockets and devices are left out. It goes as one stream, however many files it is.
        """
        return self._loop_thread.call(self._async.upload_tree, source, path, progress=progress)

    def download_tree(
        self, path: str, target: str | os.PathLike[str], *, progress: ProgressCallback | None = None
    ) -> Tree:
        """
        Copy what is in a directory into the directory `target` of this machine, which is made.
        Nothing is written outside of that, and no link there is followed. Directories are merged,
        files replace files, each when it is whole. Links that could lead out are left out.
        """
        return self._loop_thread.call(self._async.download_tree, path, target, progress=progress)


class Secrets:
    """Environment variables of all that runs in the session; the server tells their names only."""

    def __init__(self, inner: AsyncSecrets, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    def set(self, name: str, value: str) -> None:
        """Give it to whatever is run from now on; what runs already keeps what it has."""
        self._loop_thread.call(self._async.set, name, value)

    def remove(self, name: str) -> None:
        """Raises `NotFound` when there is none of this name."""
        self._loop_thread.call(self._async.remove, name)

    def list(self) -> tuple[str, ...]:
        """Their names."""
        return self._loop_thread.call(self._async.list)


class Context:
    """
    A Python process of a session that keeps variables, imports and open files between runs.

    It is deleted when a `with` block of it is left, and in any case with its session.
    """

    def __init__(self, inner: AsyncContext, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    @property
    def id(self) -> str:
        return self._async.id

    @property
    def info(self) -> ContextInfo:
        """As of the last answer about it; `refresh` asks again."""
        return self._async.info

    def __repr__(self) -> str:
        return repr(self._async)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop_thread.call(self._async.__aexit__, kind, error, trace)

    def run(
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
        return self._loop_thread.call(
            self._async.run,
            code,
            timeout=timeout,
            stdin=stdin,
            env=env,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            on_result=on_result,
            on_event=on_event,
            on_approval=on_approval,
            execution_id=execution_id,
            idempotency_key=idempotency_key,
        )

    def submit(
        self,
        code: str,
        *,
        timeout: float | None = None,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        execution_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> Execution:
        """Like `run`, without waiting for anything but the server's word that it will be run."""
        return Execution(
            self._loop_thread.call(
                self._async.submit,
                code,
                timeout=timeout,
                stdin=stdin,
                env=env,
                execution_id=execution_id,
                idempotency_key=idempotency_key,
            ),
            self._loop_thread,
        )

    def interrupt(self) -> ContextInfo:
        """KeyboardInterrupt in what runs now, if anything does; the variables stay."""
        return self._loop_thread.call(self._async.interrupt)

    def restart(self) -> ContextInfo:
        """Begin anew, with nothing; what runs is cancelled. This is what a dead one needs."""
        return self._loop_thread.call(self._async.restart)

    def refresh(self) -> ContextInfo:
        """Ask the server how it is."""
        return self._loop_thread.call(self._async.refresh)

    def delete(self) -> None:
        """End it; what runs is cancelled."""
        self._loop_thread.call(self._async.delete)


class Session(AttributeHints):
    """
    A sandbox that lives until it is deleted or its time is over. A `with` block deletes it at its
    end. At rest (stopped, archived) it has its files and uses neither memory nor CPU time; what is
    asked of it starts it again.
    """

    def __init__(self, inner: AsyncSession, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    ALTERNATIVES = SESSION_ALTERNATIVES

    @property
    def id(self) -> str:
        return self._async.id

    @property
    def info(self) -> SessionInfo:
        """As of the last answer about it; `refresh` asks again."""
        return self._async.info

    @property
    def files(self) -> Files:
        """Its workspace."""
        return Files(self._async.files, self._loop_thread)

    @property
    def secrets(self) -> Secrets:
        """Variables whose values nobody is shown."""
        return Secrets(self._async.secrets, self._loop_thread)

    def __repr__(self) -> str:
        return repr(self._async)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop_thread.call(self._async.__aexit__, kind, error, trace)

    def run(
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
        return self._loop_thread.call(
            self._async.run,
            code,
            language=language,
            command=command,
            event=event,
            timeout=timeout,
            stdin=stdin,
            env=env,
            args=args,
            cwd=cwd,
            stdin_open=stdin_open,
            wait=wait,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            on_event=on_event,
            on_approval=on_approval,
            execution_id=execution_id,
            idempotency_key=idempotency_key,
        )

    def stream(
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
    ) -> Iterator[Event]:
        """
        Like `run`, giving the events as they happen; the last one is the `result`.

        A connection that breaks is taken up again where it broke, with no gap and no repeat, also
        when the server was started again. Leaving the iteration before the end cancels the
        execution; `submit` and `events` leave it running. Each event has the `execution_id`, by
        which `execution` talks to it meanwhile.
        """
        yield from self._loop_thread.iterate(
            self._async.stream(
                code,
                language=language,
                command=command,
                event=event,
                timeout=timeout,
                stdin=stdin,
                env=env,
                args=args,
                cwd=cwd,
                stdin_open=stdin_open,
                execution_id=execution_id,
                idempotency_key=idempotency_key,
            )
        )

    def submit(
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
    ) -> Execution:
        """
        Like `run`, without waiting for anything but the server's word that it will be run. With
        `stdin_open` its stdin stays open behind `stdin`, for `execution.write`.
        """
        return Execution(
            self._loop_thread.call(
                self._async.submit,
                code,
                language=language,
                command=command,
                event=event,
                timeout=timeout,
                stdin=stdin,
                env=env,
                args=args,
                cwd=cwd,
                stdin_open=stdin_open,
                execution_id=execution_id,
                idempotency_key=idempotency_key,
            ),
            self._loop_thread,
        )

    def invoke(
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
    ) -> Invocation:
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
        return Invocation(
            self._loop_thread.call(
                self._async.invoke,
                function,
                code=code,
                command=command,
                language=language,
                input=input,
                content_type=content_type,
                timeout=timeout,
                wait=wait,
                mode=mode,
                metadata=metadata,
                invocation_id=invocation_id,
                execution_id=execution_id,
                stdin=stdin,
                stdin_open=stdin_open,
                env=env,
                args=args,
                cwd=cwd,
                idempotency_key=idempotency_key,
            ),
            self._loop_thread,
        )

    def interactive(
        self,
        command: Sequence[str] | None = None,
        *,
        rows: int | None = None,
        cols: int | None = None,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        idempotency_key: str | None = None,
    ) -> Execution:
        """
        Start a command (a shell, if none is given) to talk with: see `execution.console()`.

        With `rows` and `cols` it runs on a terminal of that size, otherwise on pipes whose input
        stays open. `timeout` is in seconds; without, it may take as long as the server allows.
        """
        return Execution(
            self._loop_thread.call(
                self._async.interactive,
                command,
                rows=rows,
                cols=cols,
                timeout=timeout,
                env=env,
                cwd=cwd,
                idempotency_key=idempotency_key,
            ),
            self._loop_thread,
        )

    def context(
        self,
        language: str = "python",
        *,
        cwd: str | None = None,
        idempotency_key: str | None = None,
    ) -> Context:
        """
        A new context, whose runs find what earlier ones left behind; python is the only `language`
        that has them. It begins in `cwd`, by default the workspace. A `with` block deletes it at
        its end.
        """
        return Context(
            self._loop_thread.call(
                self._async.context, language, cwd=cwd, idempotency_key=idempotency_key
            ),
            self._loop_thread,
        )

    def contexts(self) -> Iterator[Context]:
        """The contexts that it has, oldest first."""
        for item in self._loop_thread.iterate(self._async.contexts()):
            yield Context(item, self._loop_thread)

    def get_context(self, context_id: str) -> Context:
        """The context with this id; raises `NotFound` when there is none, or no more."""
        return Context(
            self._loop_thread.call(self._async.get_context, context_id), self._loop_thread
        )

    def execution(self, execution_id: str) -> Execution:
        """The handle of an execution known by its id; the server is not asked."""
        return Execution(self._async.execution(execution_id), self._loop_thread)

    def executions(self, *, status: str | None = None) -> Iterator[ExecutionInfo]:
        """What was run in it, newest first."""
        yield from self._loop_thread.iterate(self._async.executions(status=status))

    def artifacts(self) -> Iterator[Artifact]:
        """
        The files that its executions made or changed, by path, each as it was last; for
        `files.download`. They may have been removed since.
        """
        yield from self._loop_thread.iterate(self._async.artifacts())

    def checkpoint(self) -> Checkpoint:
        """Save its files now; that is done when this returns."""
        return self._loop_thread.call(self._async.checkpoint)

    def last_checkpoint(self) -> Checkpoint | None:
        """The last time that its files were saved; also after its end, for a while."""
        return self._loop_thread.call(self._async.last_checkpoint)

    def processes(self) -> list[ProcessInfo]:
        """What its executions left running in the background."""
        return self._loop_thread.call(self._async.processes)

    def end_processes(self) -> list[ProcessInfo]:
        """End those, with everything they started; what they were."""
        return self._loop_thread.call(self._async.end_processes)

    def dependencies(self) -> Packages:
        """Its own Python packages: what was asked for, what is installed, or how far that is."""
        return self._loop_thread.call(self._async.dependencies)

    def install(
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
        return self._loop_thread.call(
            self._async.install,
            dependencies,
            timeout=timeout,
            allow_version_conflicts=allow_version_conflicts,
        )

    def install_log(self) -> str:
        """What the last installation printed, while it goes on too."""
        return self._loop_thread.call(self._async.install_log)

    def refresh(self) -> SessionInfo:
        """Ask the server how it is."""
        return self._loop_thread.call(self._async.refresh)

    def start(self, *, wait: float | None = None) -> SessionInfo:
        """
        Have it run: with its files from the node or from the archive, or from where it was paused.
        What is run in it does that by itself, unless `auto_start` is False.

        This and the others of its kind wait until the session is so, at most `wait` seconds; the
        `status` says what it is then. The server goes on with it in any case.
        """
        return self._loop_thread.call(self._async.start, wait=wait)

    def stop(self, *, wait: float | None = None) -> SessionInfo:
        """
        End what runs in it and give back its memory; its files stay on its node. Its life does not
        go on until it is started again, which begins a new one.
        """
        return self._loop_thread.call(self._async.stop, wait=wait)

    def archive(self, *, wait: float | None = None) -> SessionInfo:
        """Stop it, and have its files in the blob store alone, where any node can start it from."""
        return self._loop_thread.call(self._async.archive, wait=wait)

    def pause(self, *, wait: float | None = None) -> SessionInfo:
        """
        Let it stand still with its memory, contexts and processes; it uses no CPU time. Raises
        `Conflict` with the code `session_busy` while an execution is under way. Its life goes on.
        """
        return self._loop_thread.call(self._async.pause, wait=wait)

    def resume(self, *, wait: float | None = None) -> SessionInfo:
        """The same as `start`."""
        return self._loop_thread.call(self._async.resume, wait=wait)

    def update(
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
        return self._loop_thread.call(
            self._async.update,
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

    def extend(self, seconds: int) -> SessionInfo:
        """Give it so many seconds of life from now on."""
        return self._loop_thread.call(self._async.extend, seconds)

    def clone(
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
    ) -> Session:
        """
        A new session as this one is, but for what is given (see `update`), with a copy of its
        files as they are now. Memory, processes and executions are not copied.
        """
        return Session(
            self._loop_thread.call(
                self._async.clone,
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
                idempotency_key=idempotency_key,
            ),
            self._loop_thread,
        )

    def delete(self) -> SessionInfo:
        """End it; its record and the results stay readable. Doing so again changes nothing."""
        return self._loop_thread.call(self._async.delete)


class Sessions:
    """All sessions of the server."""

    def __init__(self, inner: AsyncSessions, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    def create(
        self,
        template: str | None = None,
        *,
        timeout: int | None = None,
        cpu: str | float | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        max_processes: int | None = None,
        env: Mapping[str, str] | None = None,
        capacity: int | None = None,
        dependencies: Sequence[str | Mapping[str, str]] = (),
        install_timeout: int | None = None,
        fail_on_dependency_error: bool | None = None,
        allow_version_conflicts: bool | None = None,
        secrets: Mapping[str, str] | None = None,
        volumes: Sequence[Mount] = (),
        workspace_mode: str | None = None,
        durability: str | None = None,
        started_from: str | None = None,
        labels: Mapping[str, str] | None = None,
        auto_start: bool | None = None,
        idle_timeout: int | None = None,
        archive_after: int | None = None,
        delete_after: int | None = None,
        idempotency_key: str | None = None,
    ) -> Session:
        """
        A new session, ready to run code, which lives until its time is over, or for the length of a
        `with` block.

        `timeout` is its life in seconds. `cpu` is in cores (1, 0.5, "500m"), `memory` and `disk` in
        bytes or like "512Mi". What is left out comes from the template, and from the server's
        settings after that. `capacity` is how many executions run in it at the same time, 1 by
        default; what is submitted beyond that waits in order.

        `secrets` are variables as `env` is, which the server keeps encrypted and shows to nobody.
        `volumes` are shown inside where each `Mount` says. With `workspace_mode="mount"` the
        workspace is in the server's bucket itself, mounted by the node. With
        `durability="execution"` files are saved before each result is final. With `started_from`
        it begins with the files of that session, which may have ended.

        `dependencies` are Python packages of its own, such as "requests" or "pandas>=2,<3"; the
        call waits for them, at most `install_timeout` seconds (300). When they cannot be installed
        it raises `InvalidRequest` with the code `dependency_failed`, unless
        `fail_on_dependency_error` is False. Versions of the template's packages stand, unless
        `allow_version_conflicts` is True.

        `idle_timeout` is after how many seconds without requests it is stopped; `archive_after` and
        `delete_after` are after how many seconds at rest it is archived, or ends. 0 is never; what
        is left out is as the server's settings say. What is asked of a session that is paused or
        at rest starts it, unless `auto_start` is False. `labels` are yours, and are shown.

        With an `idempotency_key`, all calls with the same key and arguments give the same session,
        also those of other processes.
        """
        return Session(
            self._loop_thread.call(
                self._async.create,
                template,
                timeout=timeout,
                cpu=cpu,
                memory=memory,
                disk=disk,
                max_processes=max_processes,
                env=env,
                capacity=capacity,
                dependencies=dependencies,
                install_timeout=install_timeout,
                fail_on_dependency_error=fail_on_dependency_error,
                allow_version_conflicts=allow_version_conflicts,
                secrets=secrets,
                volumes=volumes,
                workspace_mode=workspace_mode,
                durability=durability,
                started_from=started_from,
                labels=labels,
                auto_start=auto_start,
                idle_timeout=idle_timeout,
                archive_after=archive_after,
                delete_after=delete_after,
                idempotency_key=idempotency_key,
            ),
            self._loop_thread,
        )

    def get(self, session_id: str) -> Session:
        """The session with this id; raises `NotFound` when there is none."""
        return Session(self._loop_thread.call(self._async.get, session_id), self._loop_thread)

    def list(self, *, status: str | None = None, template: str | None = None) -> Iterator[Session]:
        """Sessions, newest first, ended ones included; pages are fetched as they are needed."""
        for item in self._loop_thread.iterate(self._async.list(status=status, template=template)):
            yield Session(item, self._loop_thread)

    def delete(self, session_id: str) -> SessionInfo:
        """End a session; its record and the results stay readable."""
        return self._loop_thread.call(self._async.delete, session_id)


class Templates:
    """All templates of the server."""

    def __init__(self, inner: AsyncTemplates, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    def create(
        self,
        name: str,
        *,
        template_id: str | None = None,
        image: str | None = None,
        base_image: str | None = None,
        python: str | None = None,
        preload: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        pool_size: int | None = None,
        pool_max: int | None = None,
        cpu: str | float | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        max_processes: int | None = None,
        require: Sequence[str] | None = None,
        debian_packages: Sequence[str] | None = None,
        python_packages: Sequence[str] | None = None,
        runtime: str | None = None,
        dockerfile: str | None = None,
        context: str | os.PathLike[str] | None = None,
        registry: Mapping[str, str] | None = None,
    ) -> TemplateInfo:
        """
        A new template.

        `image` is a root file system directory on the node, `python` the interpreter, `preload` the
        modules it has imported before code arrives, `pool_size` and `pool_max` how many instances
        are kept ready at least and, when many are asked for, at most, `require` what a node must be
        able to give. `debian_packages` and `python_packages` are installed on `base_image`: a root
        file system directory, `template:` and another template's id, or nothing for the node's own
        Python. That takes a while: see `wait_ready`.

        Where sessions are made by Docker, `image` is the name of an image, or `dockerfile` the text
        of a Dockerfile, and `context` a directory of this machine that it copies from; what its
        `.dockerignore` leaves out is not sent. `registry` has the credentials for pulling:
        `username` and `password`, or `identity_token`, and with a Dockerfile the `server`.
        `runtime` is an OCI runtime such as `runsc`.
        """
        return self._loop_thread.call(
            self._async.create,
            name,
            template_id=template_id,
            image=image,
            base_image=base_image,
            python=python,
            preload=preload,
            env=env,
            pool_size=pool_size,
            pool_max=pool_max,
            cpu=cpu,
            memory=memory,
            disk=disk,
            max_processes=max_processes,
            require=require,
            debian_packages=debian_packages,
            python_packages=python_packages,
            runtime=runtime,
            dockerfile=dockerfile,
            context=context,
            registry=registry,
        )

    def get(self, template_id: str) -> TemplateInfo:
        return self._loop_thread.call(self._async.get, template_id)

    def list(self) -> Iterator[TemplateInfo]:
        yield from self._loop_thread.iterate(self._async.list())

    def update(
        self,
        template_id: str,
        *,
        name: str | None = None,
        image: str | None = None,
        base_image: str | None = None,
        python: str | None = None,
        preload: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        pool_size: int | None = None,
        pool_max: int | None = None,
        cpu: str | float | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        max_processes: int | None = None,
        require: Sequence[str] | None = None,
        debian_packages: Sequence[str] | None = None,
        python_packages: Sequence[str] | None = None,
        runtime: str | None = None,
        dockerfile: str | None = None,
        context: str | os.PathLike[str] | None = None,
        registry: Mapping[str, str] | None = None,
    ) -> TemplateInfo:
        """
        Change what is given and keep the rest, as a new version; sessions that exist already keep
        theirs.
        """
        return self._loop_thread.call(
            self._async.update,
            template_id,
            name=name,
            image=image,
            base_image=base_image,
            python=python,
            preload=preload,
            env=env,
            pool_size=pool_size,
            pool_max=pool_max,
            cpu=cpu,
            memory=memory,
            disk=disk,
            max_processes=max_processes,
            require=require,
            debian_packages=debian_packages,
            python_packages=python_packages,
            runtime=runtime,
            dockerfile=dockerfile,
            context=context,
            registry=registry,
        )

    def send_context(self, source: str | os.PathLike[str]) -> str:
        """
        Send a directory of this machine for Dockerfiles to copy from, and tell its digest. What
        its `.dockerignore` leaves out is not sent.
        """
        return self._loop_thread.call(self._async.send_context, source)

    def versions(self, template_id: str) -> Iterator[TemplateInfo]:
        """What it is and was, newest first."""
        yield from self._loop_thread.iterate(self._async.versions(template_id))

    def version(self, template_id: str, number: int) -> TemplateInfo:
        return self._loop_thread.call(self._async.version, template_id, number)

    def build(self, template_id: str) -> TemplateInfo:
        """Build the same again as a new version, with the packages that there are now."""
        return self._loop_thread.call(self._async.build, template_id)

    def log(self, template_id: str, version: int | None = None) -> str:
        """What the build of the newest version, or of another, has printed: its end."""
        return self._loop_thread.call(self._async.log, template_id, version)

    def follow(self, template_id: str, version: int | None = None) -> Iterator[BuildEvent]:
        """What a build prints, and how it goes, as it happens; ends with the build."""
        yield from self._loop_thread.iterate(self._async.follow(template_id, version))

    def wait_ready(self, template_id: str, timeout: float | None = None) -> TemplateInfo:
        """
        The template once its build has ended well. Raises `PermanentError` with code `build_failed`
        when it has not, and `TimeoutError` when that takes longer than `timeout` seconds.
        """
        return self._loop_thread.call(self._async.wait_ready, template_id, timeout)

    def delete(self, template_id: str) -> None:
        self._loop_thread.call(self._async.delete, template_id)


class Volumes:
    """All volumes of the server."""

    def __init__(self, inner: AsyncVolumes, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    def create(
        self, volume_id: str, *, size: str | int | None = None, kind: str | None = None
    ) -> VolumeInfo:
        """
        A new, empty volume of this name.

        `kind` is `local`, on the disk of one node and of a `size` in bytes or like "1Gi", or `s3`,
        in the bucket of the server's blobs and as large as that allows. Without one it is `s3`
        where blobs are on S3.
        """
        return self._loop_thread.call(self._async.create, volume_id, size=size, kind=kind)

    def get(self, volume_id: str) -> VolumeInfo:
        return self._loop_thread.call(self._async.get, volume_id)

    def list(self) -> Iterator[VolumeInfo]:
        yield from self._loop_thread.iterate(self._async.list())

    def delete(self, volume_id: str) -> None:
        """With all that is in it; raises `Conflict` while a session has it."""
        self._loop_thread.call(self._async.delete, volume_id)


class Nodes:
    """All nodes of the server."""

    def __init__(self, inner: AsyncNodes, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    def list(self) -> Iterator[NodeInfo]:
        yield from self._loop_thread.iterate(self._async.list())

    def get(self, node_id: str) -> NodeInfo:
        return self._loop_thread.call(self._async.get, node_id)

    def cordon(self, node_id: str) -> NodeInfo:
        """Give it no new sessions; those that it has stay."""
        return self._loop_thread.call(self._async.cordon, node_id)

    def uncordon(self, node_id: str) -> NodeInfo:
        """Give it sessions again; this ends a drain."""
        return self._loop_thread.call(self._async.uncordon, node_id)

    def drain(self, node_id: str) -> NodeInfo:
        """
        Have its sessions go on on other nodes, with their files. This returns at once; `drain` of
        the node tells how far it is, and `follow_drain` goes on telling. Raises `Conflict` with
        code `drain_unavailable` where that cannot be.
        """
        return self._loop_thread.call(self._async.drain, node_id)

    def follow_drain(self, node_id: str, *, timeout: float | None = None) -> Iterator[NodeInfo]:
        """
        The node each time its drain has got further, until all sessions have left or somebody ends
        it. Raises `TimeoutError` when that takes longer than `timeout` seconds.
        """
        yield from self._loop_thread.iterate(self._async.follow_drain(node_id, timeout=timeout))

    def delete(self, node_id: str) -> None:
        """Forget a node that is lost or drained; raises `Conflict` while it has sessions."""
        self._loop_thread.call(self._async.delete, node_id)

    def health(self, node_id: str) -> NodeHealth:
        """Whether the node is well, and what isolation it can give."""
        return self._loop_thread.call(self._async.health, node_id)

    def metrics(self, node_id: str) -> NodeMetrics:
        return self._loop_thread.call(self._async.metrics, node_id)


class Events:
    """What changed on the server."""

    def __init__(self, inner: AsyncEvents, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    def list(
        self, *, types: Sequence[str] = (), subject: str | None = None, after: int | None = None
    ) -> Iterator[FeedEvent]:
        """
        What is kept, oldest first, or what came after a number.

        `types` are like "session.stopped" or "session.*"; `subject` is the id of one thing.
        """
        yield from self._loop_thread.iterate(
            self._async.list(types=types, subject=subject, after=after)
        )

    def follow(
        self,
        *,
        types: Sequence[str] = (),
        subject: str | None = None,
        after: int | Literal["start", "end"] = "end",
    ) -> Iterator[FeedEvent]:
        """
        What happens from now on, without end; or from a place on: after an event's number, or from
        the "start" of what is kept. Raises `Conflict` with code `events_expired` when that place is
        no longer kept.
        """
        yield from self._loop_thread.iterate(
            self._async.follow(types=types, subject=subject, after=after)
        )


class Webhooks:
    """All webhooks of the server."""

    def __init__(self, inner: AsyncWebhooks, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    def create(
        self,
        url: str,
        *,
        types: Sequence[str] = (),
        secret: str | None = None,
        enabled: bool = True,
    ) -> WebhookInfo:
        """
        Have `url` told of what changes from now on: all of it, or events of `types`, like
        "session.stopped" or "session.*".

        What is sent is signed with `secret`, "whsec_" and 24 to 64 bytes as base64. Without one it
        is made, and is in this answer and in no other. `atoll.verify_webhook` checks it.
        """
        return self._loop_thread.call(
            self._async.create, url, types=types, secret=secret, enabled=enabled
        )

    def get(self, webhook_id: str) -> WebhookInfo:
        return self._loop_thread.call(self._async.get, webhook_id)

    def list(self) -> Iterator[WebhookInfo]:
        """Oldest first."""
        yield from self._loop_thread.iterate(self._async.list())

    def change(
        self,
        webhook_id: str,
        *,
        url: str | None = None,
        types: Sequence[str] | None = None,
        secret: str | None = None,
        enabled: bool | None = None,
    ) -> WebhookInfo:
        """Change what is given. What waits to be tried again is tried at once."""
        return self._loop_thread.call(
            self._async.change, webhook_id, url=url, types=types, secret=secret, enabled=enabled
        )

    def delete(self, webhook_id: str) -> None:
        self._loop_thread.call(self._async.delete, webhook_id)

    def test(self, webhook_id: str) -> WebhookTest:
        """Have an event `webhook.test` sent to it now, once."""
        return self._loop_thread.call(self._async.test, webhook_id)


class Pools:
    """The warm pools of the control plane that answers."""

    def __init__(self, inner: AsyncPools, loop_thread: EventLoopThread) -> None:
        self._async = inner
        self._loop_thread = loop_thread

    def list(self) -> Iterator[PoolInfo]:
        yield from self._loop_thread.iterate(self._async.list())


class Atoll(AttributeHints):
    """
    Sandboxes, of a server or of this process.

    With a `url` (or ATOLL_URL) it speaks to that server, with `api_key` (or ATOLL_API_KEY, or for
    a server on this machine the key in its data directory). Without, it runs the whole of Atoll
    inside this process, and `settings` are that one's settings. `timeout` is how long the
    server may take to answer one request, in seconds; it does not limit how long code runs.
    """

    ALTERNATIVES = CLIENT_ALTERNATIVES

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        timeout: float = 30.0,
        **settings: Any,
    ) -> None:
        self._async = AsyncAtoll(
            url, api_key=api_key, data_dir=data_dir, timeout=timeout, **settings
        )
        self._loop_thread = EventLoopThread()

    @property
    def url(self) -> str | None:
        """The server's address; none when it is this process."""
        return self._async.url

    @property
    def sessions(self) -> Sessions:
        return Sessions(self._async.sessions, self._loop_thread)

    @property
    def executions(self) -> Executions:
        return Executions(self._async.executions, self._loop_thread)

    @property
    def invocations(self) -> Invocations:
        return Invocations(self._async.invocations, self._loop_thread)

    @property
    def templates(self) -> Templates:
        return Templates(self._async.templates, self._loop_thread)

    @property
    def volumes(self) -> Volumes:
        return Volumes(self._async.volumes, self._loop_thread)

    @property
    def nodes(self) -> Nodes:
        return Nodes(self._async.nodes, self._loop_thread)

    @property
    def events(self) -> Events:
        return Events(self._async.events, self._loop_thread)

    @property
    def webhooks(self) -> Webhooks:
        return Webhooks(self._async.webhooks, self._loop_thread)

    @property
    def pools(self) -> Pools:
        return Pools(self._async.pools, self._loop_thread)

    def execution(self, execution_id: str) -> Execution:
        """The handle of an execution known by its id; the server is not asked."""
        return Execution(self._async.execution(execution_id), self._loop_thread)

    def __repr__(self) -> str:
        return repr(self._async)

    def session(
        self,
        template: str | None = None,
        *,
        timeout: int | None = None,
        cpu: str | float | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        max_processes: int | None = None,
        env: Mapping[str, str] | None = None,
        capacity: int | None = None,
        dependencies: Sequence[str | Mapping[str, str]] = (),
        install_timeout: int | None = None,
        allow_version_conflicts: bool | None = None,
        secrets: Mapping[str, str] | None = None,
        volumes: Sequence[Mount] = (),
        workspace_mode: str | None = None,
        durability: str | None = None,
        started_from: str | None = None,
        labels: Mapping[str, str] | None = None,
        auto_start: bool | None = None,
        idle_timeout: int | None = None,
        archive_after: int | None = None,
        delete_after: int | None = None,
    ) -> Session:
        """
        A session for the length of an `with`; see `sessions.create` for the arguments.
        Without a block, delete it yourself.
        """
        return Session(
            self._loop_thread.call(
                self._async.session,
                template,
                timeout=timeout,
                cpu=cpu,
                memory=memory,
                disk=disk,
                max_processes=max_processes,
                env=env,
                capacity=capacity,
                dependencies=dependencies,
                install_timeout=install_timeout,
                allow_version_conflicts=allow_version_conflicts,
                secrets=secrets,
                volumes=volumes,
                workspace_mode=workspace_mode,
                durability=durability,
                started_from=started_from,
                labels=labels,
                auto_start=auto_start,
                idle_timeout=idle_timeout,
                archive_after=archive_after,
                delete_after=delete_after,
            ),
            self._loop_thread,
        )

    def open(self) -> None:
        """Start what has to be started; the first request does it too."""
        self._loop_thread.call(self._async.open)

    def close(self) -> None:
        """Let go of the server; an embedded one ends, and its sessions with it."""
        try:
            self._loop_thread.call(self._async.close)
        finally:
            self._loop_thread.stop()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
