"""
The client of the executor protocol: one link to an executor, with many concurrent requests.

A request is a stream: `call` for those with one answer, `fetch`, `push` and `pull` for bytes, `run`
and `attach` for runs, and `watch` to follow a run at the caller's pace. When the connection ends,
every open request raises `LinkLost`. Runs in the instance continue, and a new link can attach to
them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from atoll.link.credit import Inbox
from atoll.link.errors import LinkLost, ProtocolViolation
from atoll.link.stream import Item, Piece, Reader, RunListener, Stream
from atoll.link.transport import LinkTransport
from atoll.protocol import frames

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from datetime import timedelta

    from atoll.link.messages import FileEntry, Hello, RunResult
    from atoll.link.output import Intake
    from atoll.settings import LinkSettings

__all__ = ["Link", "Piece", "RunListener"]


class Link:
    def __init__(self, transport: LinkTransport, settings: LinkSettings) -> None:
        self._transport = transport
        self._settings = settings

    @classmethod
    async def connect(
        cls, path: str, settings: LinkSettings, *, timeout: timedelta, token: str | None = None
    ) -> Link:
        """Connect to a unix socket and exchange hellos; `token` authenticates the control plane."""
        loop = asyncio.get_running_loop()

        async def dial(transport: LinkTransport) -> None:
            await loop.create_unix_connection(lambda: transport, path)

        return await cls.over(dial, path, settings, timeout=timeout, token=token)

    @classmethod
    async def over(
        cls,
        dial: Callable[[LinkTransport], Awaitable[None]],
        address: str,
        settings: LinkSettings,
        *,
        timeout: timedelta,
        token: str | None = None,
    ) -> Link:
        """
        Connect by `dial`, which makes a connection with the given asyncio protocol. `address` names
        the executor in errors.
        """
        transport = LinkTransport(settings)
        hello: dict[str, Any] = {"versions": [frames.VERSION]}
        if token is not None:
            hello["token"] = token
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                try:
                    await dial(transport)
                    transport.write(frames.encode_json(0, frames.HELLO, hello))
                    await transport.greeting
                except BaseException:
                    transport.close()
                    raise
        except TimeoutError:
            raise LinkLost(
                f"The executor at {address} did not answer within {timeout.total_seconds():g} s."
            ) from None
        except OSError as error:
            raise LinkLost(f"The executor at {address} cannot be reached: {error}.") from error
        return cls(transport, settings)

    @property
    def hello(self) -> Hello:
        """What the executor reported when it accepted the connection."""
        return self._transport.greeting.result()

    @property
    def alive(self) -> bool:
        return self._transport.alive

    @property
    def closed(self) -> asyncio.Future[None]:
        """Done when the connection has ended."""
        return self._transport.closed

    @property
    def violation(self) -> ProtocolViolation | None:
        """Why this side ended the connection, if the executor violated the protocol."""
        return self._transport.violation

    def violated(self, violation: ProtocolViolation) -> None:
        """End the connection: the executor cannot be trusted any more."""
        self._transport.violated(violation)

    def observe_zygotes(self, observer: Callable[[int], None]) -> None:
        """
        Call `observer` with the pid (in the instance's namespace) of each new zygote. A new zygote
        waits for `release`.
        """
        self._transport.observe_zygotes(observer)

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        """End the connection at once: its executor does not exist any more."""
        self._transport.abort()

    # Requests

    async def call(
        self, op: str, *, within: timedelta | None = None, **request: Any
    ) -> dict[str, Any]:
        """A request with one answer; `within` replaces the default time-out."""
        stream = self._transport.open(op, request)
        try:
            async with asyncio.timeout((within or self._settings.read_timeout).total_seconds()):
                return await stream.done
        except TimeoutError:
            raise LinkLost(f"The executor did not answer {op} in time.") from None
        finally:
            self._transport.reset(stream)

    def acknowledge(self, run_id: str) -> None:
        """The result is stored; the executor may discard it."""
        self._transport.notify("ack", {"id": run_id})

    def announce_end(self, ends_in: float) -> None:
        """
        Report when the session ends, in seconds. The executor ends the instance some time after
        that, unless a control plane is connected to it.
        """
        grace, limit = self._settings.unattended_grace, self._settings.unattended_limit
        life = {
            "ends_in": ends_in,
            "grace": grace.total_seconds(),
            "limit": limit.total_seconds(),
        }
        self._transport.notify("unattended", life)

    async def run(
        self, request: dict[str, Any], listener: RunListener, intake: Intake
    ) -> RunResult:
        """
        Run something, or attach to it if the executor has it already, and return its result.
        `intake` counts the output over all links that follow the run.
        """
        return await self._follow("run", request, listener, intake)

    async def attach(
        self,
        run_id: str,
        after: int,
        listener: RunListener | None,
        intake: Intake | None = None,
        *,
        expected: bool = False,
    ) -> RunResult:
        """
        Follow a run's output from behind sequence number `after`, and return its result. With
        `expected`, wait for a run that has not been requested yet. `intake` limits what the
        listener receives; a listener that stores anything needs one.
        """
        if intake is not None:
            # The intake drops entries beyond its limits, which the listener does not know.
            after = max(after, intake.sequence)
        request = {"id": run_id, "after": after, "expected": expected}
        # An expected run sends no heartbeats until it starts.
        return await self._follow("attach", request, listener, intake, live=not expected)

    async def _follow(
        self,
        op: str,
        request: dict[str, Any],
        listener: RunListener | None,
        intake: Intake | None,
        *,
        live: bool = True,
    ) -> RunResult:
        reader = Reader(frames.OUTPUT, listener=listener, intake=intake)
        stream = self._transport.open(op, request, reader)
        if live:
            self._transport.liveness.follow()
        try:
            return cast("RunResult", await stream.done)
        finally:
            if live:
                self._transport.liveness.unfollow()
            self._transport.reset(stream)

    async def watch(
        self, run_id: str, after: int, *, expected: bool = False
    ) -> AsyncIterator[Piece | dict[str, Any]]:
        """
        Follow a run from behind sequence number `after`, at the caller's pace: pieces, events, and
        at the end `{"event": "end", "result": …}`.

        At most one window is buffered. A slower caller misses what the executor does not keep for
        so long, and delays no other client.
        """
        request = {"id": run_id, "after": after, "expected": expected}
        inbox = Inbox[Item]()
        reader = Reader(frames.OUTPUT, inbox)
        stream = self._transport.open("attach", request, reader, vital=False)
        taken, started = 0, False
        try:
            while (item := await inbox.get()) is not None:
                if isinstance(item, Piece):
                    yield item
                    taken += len(item.data) + frames.OUTPUT_HEADER.size
                    if inbox.empty() or taken >= frames.WINDOW // 4:
                        self._transport.grant(stream, taken)
                        taken = 0
                elif isinstance(item, dict):
                    if not started:
                        # Only now: a run sends no heartbeats before it starts.
                        started = True
                        self._transport.liveness.follow()
                    yield item
            yield {"event": "end", "result": await stream.done}
        finally:
            if started:
                self._transport.liveness.unfollow()
            self._transport.reset(stream)

    async def read(
        self,
        path: str,
        *,
        part: tuple[int | None, int | None] | None = None,
        if_range: str | None = None,
        head: bool = False,
    ) -> tuple[FileEntry, AsyncIterator[bytes]]:
        """
        Read a file: its entry, and its content in pieces at the caller's pace.

        `part` is the first and the last byte to read; without a first, that many bytes from the
        end. It is ignored if the file's tag is not `if_range`. `start` and `stop` of the entry are
        the range that is sent; `start` is None if the range holds no byte of the file. With `head`
        no content is sent.
        """
        request = {"path": path, "range": part, "if_range": if_range, "head": head}
        first, content = await self.fetch("read", **request)
        entry: FileEntry = first["entry"]
        start = entry["start"]
        size = 0 if head or start is None else entry["stop"] - start
        return entry, self._at_most(size, content)

    async def _at_most(self, size: int, content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Pass on at most `size` bytes: callers have announced that many."""
        async for piece in content:
            size -= len(piece)
            if size < 0:
                violation = ProtocolViolation("The executor sent more of a file than it announced.")
                self.violated(violation)
                raise violation
            yield piece

    async def fetch(self, op: str, **request: Any) -> tuple[dict[str, Any], AsyncIterator[bytes]]:
        """A request with an event and then bytes as its answer, at the caller's pace."""
        inbox = Inbox[Item]()
        stream = self._transport.open(op, request, Reader(frames.DATA, inbox))
        try:
            async with asyncio.timeout(self._settings.read_timeout.total_seconds()):
                first = await inbox.get()
            if not isinstance(first, dict):
                await stream.done
                raise LinkLost(f"The executor ended {op} without an answer.")
        except TimeoutError:
            self._transport.reset(stream)
            raise LinkLost(f"The executor did not answer {op} in time.") from None
        except BaseException:
            self._transport.reset(stream)
            raise
        return first, self._content(stream, inbox)

    async def _content(self, stream: Stream, inbox: Inbox[Item]) -> AsyncIterator[bytes]:
        taken = 0
        try:
            while (piece := await inbox.get()) is not None:
                if isinstance(piece, bytes):
                    yield piece
                    taken += len(piece)
                    if inbox.empty() or taken >= frames.WINDOW // 4:
                        self._transport.grant(stream, taken)
                        taken = 0
            await stream.done
        finally:
            self._transport.reset(stream)

    async def write(
        self,
        path: str,
        content: AsyncIterator[bytes],
        *,
        mode: int = 0o644,
        if_match: list[str] | None = None,
        if_none_match: list[str] | None = None,
        disk: int | None = None,
    ) -> FileEntry:
        """
        Write a file atomically and return its entry. `disk` limits the size of the workspace where
        the executor has to enforce that.
        """
        answer = await self.push(
            "write",
            content,
            path=path,
            mode=mode,
            if_match=if_match,
            if_none_match=if_none_match,
            disk=disk,
        )
        entry: FileEntry = answer["entry"]
        return entry

    async def push(
        self,
        op: str,
        content: AsyncIterator[bytes],
        *,
        within: timedelta | None = None,
        **request: Any,
    ) -> dict[str, Any]:
        """
        A request that takes bytes and then has one answer. `within` limits each wait, for the
        executor to take more bytes and for the answer.
        """
        timeout = (within or self._settings.read_timeout).total_seconds()
        stream = self._transport.open(op, request, sends=True)
        try:
            async for block in content:
                view = memoryview(block)
                while view:
                    if stream.credit <= 0:
                        async with asyncio.timeout(timeout):
                            await stream.wait_for_credit()
                    if stream.done.done():
                        break
                    piece = view[: stream.use_credit(len(view))]
                    self._transport.write(frames.encode(stream.number, frames.DATA, bytes(piece)))
                    view = view[len(piece) :]
                    async with asyncio.timeout(timeout):
                        await self._transport.writable.wait()
                if stream.done.done():
                    break
            if not stream.done.done():
                self._transport.write(frames.encode(stream.number, frames.FINISH))
            async with asyncio.timeout(timeout):
                return await stream.done
        except TimeoutError:
            raise LinkLost(f"The executor did not finish {op} in time.") from None
        finally:
            self._transport.reset(stream)

    async def pull(self, op: str, **request: Any) -> AsyncIterator[bytes | dict[str, Any]]:
        """
        A request that sends bytes and events, in order and at the caller's pace; its answer comes
        last.
        """
        inbox = Inbox[Item]()
        stream = self._transport.open(op, request, Reader(frames.DATA, inbox))
        timeout = self._settings.read_timeout.total_seconds()
        taken = 0
        try:
            while True:
                # Credited together, because files may be small and each credit is a frame.
                if taken >= frames.WINDOW // 2 or (taken and inbox.empty()):
                    self._transport.grant(stream, taken)
                    taken = 0
                if inbox.empty():
                    async with asyncio.timeout(timeout):
                        item = await inbox.get()
                else:
                    item = await inbox.get()
                if item is None:
                    break
                if isinstance(item, bytes):
                    yield item
                    taken += len(item)
                elif isinstance(item, dict):
                    yield item
            yield await stream.done
        except TimeoutError:
            raise LinkLost(f"The executor did not continue {op} in time.") from None
        finally:
            self._transport.reset(stream)
