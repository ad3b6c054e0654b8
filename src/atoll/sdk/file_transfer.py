"""
Uploads and downloads of single files, in chunks and constant memory.

A download resumes after a lost connection if the file is unchanged, and replaces the local file
atomically. An upload is not repeated, because its source may be consumed. The caller's own files
and iterators may block forever, so they are read in threads that nothing waits for.
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
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from atoll.errors import Conflict, InvalidRequest, PermanentError, RequestError, TemporaryError
from atoll.sdk.arguments import wrong_type
from atoll.sdk.callbacks import invoke_callback
from atoll.sdk.retry import Backoff

if TYPE_CHECKING:
    from atoll.sdk.connection import Response
    from atoll.sdk.http_client import HttpClient

T = TypeVar("T")

Source = str | os.PathLike[str] | IO[bytes] | bytes | Iterable[bytes] | AsyncIterable[bytes]
"""A local path, an open binary file, bytes, or an iterator of bytes. Open files are not closed."""
ProgressCallback = Callable[[int, int | None], object]
"""Receives the transferred bytes and the total, or None if unknown. May be async."""

CHUNK = 256 * 1024
MAX_INTERRUPTIONS = 100
"""Lost connections in one download."""
_END: Any = object()


class ProgressMeter:
    """Reports the progress of a transfer to a callback. The numbers never decrease."""

    def __init__(self, callback: ProgressCallback | None, total: int | None = None) -> None:
        self._callback = callback
        self.total = total
        self._reported = -1

    async def at(self, size: int) -> None:
        if self._callback is not None and size > self._reported:
            self._reported = size
            # The file may grow during the transfer.
            await invoke_callback(
                self._callback, size, None if self.total is None else max(size, self.total)
            )


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run `function` in a thread, and wait for it even if the call is cancelled."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def in_daemon_thread(function: Callable[..., T], *args: Any) -> T:
    """Run `function` in a thread that neither cancellation nor program exit waits for."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    done: asyncio.Future[T] = loop.create_future()

    def settle(how: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            how(value)

    def work() -> None:
        with suppress(RuntimeError):  # The loop was closed meanwhile.
            try:
                value = context.run(function, *args)
            except BaseException as error:  # noqa: BLE001 - the caller receives it
                loop.call_soon_threadsafe(settle, done.set_exception, error)
            else:
                loop.call_soon_threadsafe(settle, done.set_result, value)

    threading.Thread(target=work, name="atoll-transfer", daemon=True).start()
    return await done


class Upload:
    """The body of one upload request, read from a source."""

    def __init__(self, source: Source, progress: ProgressCallback | None) -> None:
        readable = isinstance(source, str | os.PathLike | Iterable | AsyncIterable)
        if not readable and not hasattr(source, "read"):
            raise wrong_type("source", "a path, an open file or bytes", source)
        self._source = source
        self._meter = ProgressMeter(progress)
        self._sent = 0
        self.failure: BaseException | None = None
        """The error of the source. The HTTP client reports only that the body ended."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._pieces():
                if not isinstance(piece, bytes | bytearray | memoryview):
                    raise InvalidRequest(
                        f"The source yields {type(piece).__name__}, not bytes. "
                        "Open files in binary mode.",
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
    """Bytes from the current position to the end, or None if unknown."""
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


class Download:
    """Content of a remote file from `start` to `stop`. A negative `start` counts from the end."""

    def __init__(
        self, http: HttpClient, path: str, start: int = 0, stop: int | None = None
    ) -> None:
        if stop is not None and (start < 0 or stop <= start):
            raise InvalidRequest("stop must be greater than start, and start must not be negative.")
        self._http = http
        self._path = path
        self._range = None if not start and stop is None else _range(start, stop)
        self._base = 0
        self._etag: str | None = None
        self.total: int | None = None
        """Bytes in all. Known after the first chunk."""

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        at, breaks, begun, backoff = 0, 0, False, Backoff()
        while True:
            try:
                async with self._http.stream(
                    "GET", self._path, headers=self._headers(at, begun)
                ) as response:
                    self._check(response, at, begun)
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
                    return  # Everything had arrived.
                breaks += 1
                if not begun or self._etag is None or breaks > MAX_INTERRUPTIONS:
                    raise
                await backoff.wait_or_raise(error)
            except RequestError as error:
                if error.code == "range_not_satisfiable" and not begun:
                    return
                if error.code == "precondition_failed" and begun:
                    raise Conflict(
                        "The file has changed, so the interrupted download cannot resume. "
                        "Start it again.",
                        code="file_changed",
                    ) from None
                raise

    def _headers(self, at: int, begun: bool) -> dict[str, str]:
        # Ranges and sizes must be those of the file, not of a compressed response.
        headers = {"accept-encoding": "identity"}
        if begun:
            stop = None if self.total is None else self._base + self.total
            headers |= {"range": _range(self._base + at, stop), "if-match": self._etag or "*"}
        elif self._range is not None:
            headers["range"] = self._range
        return headers

    def _check(self, response: Response, at: int, begun: bool) -> None:
        """Raise unless the response is the requested part of the same file."""
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
    """Position of the first byte: 7 for `bytes 7-9/10`."""
    number = content_range.removeprefix("bytes ").partition("-")[0]
    return int(number) if number.isascii() and number.isdecimal() else None


def _bad(path: str) -> PermanentError:
    return PermanentError(
        f"The response to GET {path} is not the requested part of the file.", code="bad_answer"
    )


async def save(download: Download, local: Path, progress: ProgressCallback | None) -> None:
    """Write to a local file, which is replaced when the download is complete."""
    part = local.with_name(f".{secrets.token_hex(8)}.part")
    pieces = aiter(download)
    first = await anext(pieces, b"")  # Before anything is created locally.
    file = await in_thread(part.open, "xb")
    try:
        try:
            write = partial(in_thread, file.write)
            await _copy(download, first, pieces, write, progress)
        finally:
            await in_thread(file.close)
        await in_thread(os.replace, part, local)
    except BaseException:
        await in_thread(_remove, part)
        raise


async def write_to(download: Download, file: IO[bytes], progress: ProgressCallback | None) -> None:
    """Write to an open file, which is flushed and left open."""
    pieces = aiter(download)
    first = await anext(pieces, b"")
    write = partial(in_daemon_thread, _write, file)
    await _copy(download, first, pieces, write, progress)
    if hasattr(file, "flush"):
        await in_daemon_thread(file.flush)


async def _copy(
    download: Download,
    first: bytes,
    pieces: AsyncGenerator[bytes, None],
    write: Callable[[bytes], Any],
    progress: ProgressCallback | None,
) -> None:
    meter, size, piece = ProgressMeter(progress, download.total), 0, first
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
        # An unbuffered file may write less.
        view = view[len(view) if written is None else written :]


def _remove(part: Path) -> None:
    part.unlink(missing_ok=True)
