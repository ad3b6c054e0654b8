"""
The bytes of one file on their way, in pieces: memory does not go by the size.

A download that breaks is taken up where it broke, as long as the file is still the same one; a file
of this machine is there whole or not at all. An upload is not repeated: what it reads from may be
gone. What a caller's own file or iterator does may take for ever, so nobody waits for it to end
when the transfer is given up.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import secrets
import stat
import threading
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from atoll.errors import Conflict, InvalidRequest, PermanentError, RequestError, TemporaryError
from atoll.sdk.arguments import wrong_type
from atoll.sdk.callbacks import invoke_callback
from atoll.sdk.retry import Backoff

if TYPE_CHECKING:
    import httpx

    from atoll.sdk.http_client import HttpClient

T = TypeVar("T")

Source = str | os.PathLike[str] | IO[bytes] | bytes | Iterable[bytes] | AsyncIterable[bytes]
"""A path of this machine, an open binary file, or pieces; all but the first are read from where
they are, and a file is not closed."""
ProgressCallback = Callable[[int, int | None], object]
"""Is given the bytes so far and of all, None while that is unknown; awaited if it can be."""

CHUNK = 256 * 1024
MAX_INTERRUPTIONS = 100
"""Of one download. Each is waited out by a `Backoff`."""
_END: Any = object()


class ProgressMeter:
    """Tells a callback how far a transfer is, never less than before."""

    def __init__(self, callback: ProgressCallback | None, total: int | None = None) -> None:
        self._callback = callback
        self.total = total
        self._told = -1

    async def at(self, size: int) -> None:
        if self._callback is not None and size > self._told:
            self._told = size
            # What grows meanwhile must not be more than all of it.
            await invoke_callback(
                self._callback, size, None if self.total is None else max(size, self.total)
            )


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """In a thread, which has ended when this has, also when it is cancelled."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def in_daemon_thread(function: Callable[..., T], *args: Any) -> T:
    """In a thread that nobody waits for, not even the end of the program."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    done: asyncio.Future[T] = loop.create_future()

    def settle(how: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            how(value)

    def work() -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            try:
                value = context.run(function, *args)
            except BaseException as error:  # noqa: BLE001 - it is raised by who waits
                loop.call_soon_threadsafe(settle, done.set_exception, error)
            else:
                loop.call_soon_threadsafe(settle, done.set_result, value)

    threading.Thread(target=work, name="atoll-transfer", daemon=True).start()
    return await done


# Sending


class Upload:
    """The pieces of a source, for one request."""

    def __init__(self, source: Source, progress: ProgressCallback | None) -> None:
        readable = isinstance(source, str | os.PathLike | Iterable | AsyncIterable)
        if not readable and not hasattr(source, "read"):
            raise wrong_type("source", "a path, an open file or bytes", source)
        self._source = source
        self._meter = ProgressMeter(progress)
        self._sent = 0
        self.failure: BaseException | None = None
        """What ended the pieces: the line only tells that they ended."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._pieces():
                if not isinstance(piece, bytes | bytearray | memoryview):
                    raise InvalidRequest(
                        f"It gives {type(piece).__name__}, not bytes; open files in binary mode.",
                        code="not_bytes",
                    )
                if piece:
                    yield bytes(piece)
                    self._sent += len(piece)
                    await self._meter.at(self._sent)
            await self._meter.at(self._sent)
        except GeneratorExit:
            raise
        except BaseException as error:
            self.failure = error
            raise

    async def _pieces(self) -> AsyncIterator[bytes]:
        source = self._source
        if isinstance(source, bytes | bytearray | memoryview):
            self._meter.total = len(source)
            for start in range(0, len(source), CHUNK):
                yield bytes(source[start : start + CHUNK])
        elif isinstance(source, str | os.PathLike):
            file = await asyncio.to_thread(Path(source).open, "rb")
            try:
                self._meter.total = await asyncio.to_thread(_size, file)
                while piece := await asyncio.to_thread(file.read, CHUNK):
                    yield piece
            finally:
                await in_thread(file.close)
        elif isinstance(source, AsyncIterable):
            async for piece in source:
                yield piece
        elif hasattr(source, "read"):
            self._meter.total = await in_daemon_thread(_size, source)
            while piece := await in_daemon_thread(source.read, CHUNK):
                yield piece
        else:
            pieces = iter(source)
            while (piece := await in_daemon_thread(next, pieces, _END)) is not _END:
                yield piece


def _size(file: Any) -> int | None:
    """From where it stands to its end, if it has one that is known."""
    try:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode):
            return max(0, status.st_size - int(file.tell()))
    except (AttributeError, OSError, ValueError):
        with suppress(AttributeError, OSError, ValueError):
            at = int(file.tell())
            size = int(file.seek(0, os.SEEK_END)) - at
            file.seek(at)
            return max(0, size)
    return None


# Getting


class Download:
    """The pieces of a file of the server, from `start` to before `stop`; `start` may be negative,
    from its end."""

    def __init__(
        self, http: HttpClient, path: str, start: int = 0, stop: int | None = None
    ) -> None:
        if stop is not None and (start < 0 or stop <= start):
            raise InvalidRequest("stop: it must be behind start, which must not be negative.")
        self._http = http
        self._path = path
        self._range = None if not start and stop is None else _range(start, stop)
        self._base = 0
        self._etag: str | None = None
        self.total: int | None = None
        """Known with the first piece."""

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        at, breaks, begun, backoff = 0, 0, False, Backoff()
        while True:
            try:
                async with self._http.stream(
                    "GET", self._path, headers=self._headers(at, begun)
                ) as response:
                    self._look(response, at, begun)
                    begun = True
                    async for piece in response.aiter_raw(CHUNK):
                        at += len(piece)
                        backoff.reset()
                        yield piece
                if self.total in (None, at):
                    return
                raise TemporaryError(f"{self._path} ended after {at} bytes.", code="stream_cut")
            except TemporaryError as error:
                if begun and at == self.total:
                    return  # the line broke behind it
                breaks += 1
                if not begun or self._etag is None or breaks > MAX_INTERRUPTIONS:
                    raise
                await backoff.wait_or_raise(error)
            except RequestError as error:
                if error.code == "range_not_satisfiable" and not begun:
                    return
                if error.code == "precondition_failed" and begun:
                    raise Conflict(
                        "The file was changed while it was downloaded, and the line broke; begin "
                        "again.",
                        code="file_changed",
                    ) from None
                raise

    def _headers(self, at: int, begun: bool) -> dict[str, str]:
        # Ranges and sizes are those of the file, not of something that was made of it on the way.
        headers = {"accept-encoding": "identity"}
        if begun:
            stop = None if self.total is None else self._base + self.total
            headers |= {"range": _range(self._base + at, stop), "if-match": self._etag or "*"}
        elif self._range is not None:
            headers["range"] = self._range
        return headers

    def _look(self, response: httpx.Response, at: int, begun: bool) -> None:
        """Whether it is what was asked for."""
        headers = response.headers
        length = headers.get("content-length", "")
        size = int(length) if length.isascii() and length.isdecimal() else None
        partial = response.status_code == 206
        base = _first(headers.get("content-range", "")) if partial else 0
        wanted = begun or self._range is not None
        if headers.get("content-encoding", "identity") != "identity" or partial != wanted:
            raise _bad(self._path)
        if not begun:
            if base is None:
                raise _bad(self._path)
            self._base, self.total = base, size
            etag = headers.get("etag", "")
            self._etag = etag if etag.startswith('"') else None
        elif base != self._base + at or headers.get("etag") != self._etag:
            raise _bad(self._path)


def _range(start: int, stop: int | None) -> str:
    if start < 0:
        return f"bytes={start}"
    return f"bytes={start}-{'' if stop is None else stop - 1}"


def _first(content_range: str) -> int | None:
    """The place of the first byte, from `bytes 7-9/10`."""
    number = content_range.removeprefix("bytes ").partition("-")[0]
    return int(number) if number.isascii() and number.isdecimal() else None


def _bad(path: str) -> PermanentError:
    return PermanentError(
        f"The answer to GET {path} is not the part that was asked for.", code="bad_answer"
    )


async def save(getting: Download, local: Path, progress: ProgressCallback | None) -> None:
    """Into a file of this machine, which is replaced when all of it is there."""
    part = local.with_name(f".{secrets.token_hex(8)}.part")
    pieces = aiter(getting)
    first = await anext(pieces, b"")  # before anything is made here
    file = await in_thread(part.open, "xb")
    try:
        try:
            await _pour(
                getting, first, pieces, lambda piece: in_thread(file.write, piece), progress
            )
        finally:
            await in_thread(file.close)
        await in_thread(os.replace, part, local)
    except BaseException:
        await in_thread(_remove, part)
        raise


async def pour(getting: Download, file: IO[bytes], progress: ProgressCallback | None) -> None:
    """Into an open file, which is left open, and flushed."""
    pieces = aiter(getting)
    first = await anext(pieces, b"")
    await _pour(
        getting, first, pieces, lambda piece: in_daemon_thread(_write, file, piece), progress
    )
    if hasattr(file, "flush"):
        await in_daemon_thread(file.flush)


async def _pour(
    getting: Download,
    first: bytes,
    pieces: AsyncGenerator[bytes, None],
    write: Callable[[bytes], Any],
    progress: ProgressCallback | None,
) -> None:
    meter, size, piece = ProgressMeter(progress, getting.total), 0, first
    try:
        while piece:
            await write(piece)
            size += len(piece)
            await meter.at(size)
            piece = await anext(pieces, b"")
    finally:
        await pieces.aclose()
    await meter.at(size)


def _write(file: IO[bytes], piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        written = file.write(view)
        # A file that has no buffer may take less than it was given.
        view = view[len(view) if written is None else written :]


def _remove(part: Path) -> None:
    part.unlink(missing_ok=True)
