"""
Parses multipart/form-data as a stream: each part is passed on while it arrives.

Starlette's own parser writes the complete form to disk before the route sees a byte; this uses the
parser below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from python_multipart.multipart import MultipartParser, parse_options_header

from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MAX_FIELD = 64 * 1024
MAX_HEADER = 16 * 1024

_BEGIN, _DATA, _END = range(3)


class Part:
    """One part. What is not read of its content is skipped when the next part is asked for."""

    def __init__(self, events: _Events, name: str, filename: str | None) -> None:
        self._events = events
        self.name = name
        self.filename = filename

    async def content(self) -> AsyncIterator[bytes]:
        while (data := await self._events.data()) is not None:
            yield data

    async def text(self) -> str:
        """The value of a field that is not a file."""
        value = b""
        async for piece in self.content():
            value += piece
            if len(value) > MAX_FIELD:
                raise _bad("a field is too long")
        return value.decode("utf-8", "replace")


class _Events:
    def __init__(self, boundary: bytes, body: AsyncIterator[bytes]) -> None:
        self._body = body
        self._queue: list[tuple[int, bytes]] = []
        self._header: list[bytes] = [b"", b""]
        self._headers: dict[bytes, bytes] = {}
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._part_data,
                "on_part_end": self._part_end,
            },
        )
        self._found: list[dict[bytes, bytes]] = []

    def _part_begin(self) -> None:
        self._headers = {}

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0] += data[start:end]
        if len(self._header[0]) > MAX_HEADER:
            raise _bad("a header is too long")

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1] += data[start:end]
        if len(self._header[1]) > MAX_HEADER:
            raise _bad("a header is too long")

    def _header_end(self) -> None:
        self._headers[self._header[0].lower()] = self._header[1]
        self._header = [b"", b""]
        if len(self._headers) > 16:
            raise _bad("a part has too many headers")

    def _headers_finished(self) -> None:
        self._found.append(self._headers)
        self._queue.append((_BEGIN, b""))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._queue.append((_DATA, data[start:end]))

    def _part_end(self) -> None:
        self._queue.append((_END, b""))

    async def next(self) -> tuple[int, bytes] | None:
        while not self._queue:
            piece = await anext(self._body, None)
            if piece is None:
                return None
            try:
                self._parser.write(piece)
            except ValueError as error:
                raise _bad(str(error)) from None
        return self._queue.pop(0)

    async def data(self) -> bytes | None:
        """The next piece of the current part; None at its end."""
        event = await self.next()
        if event is None:
            raise _bad("it ends in the middle of a part")
        return event[1] if event[0] == _DATA else None

    def headers(self) -> dict[bytes, bytes]:
        return self._found.pop(0)


async def parts(content_type: str, body: AsyncIterator[bytes]) -> AsyncIterator[Part]:
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise _bad("it has no boundary")
    events = _Events(boundary, body)
    while (event := await events.next()) is not None:
        if event[0] != _BEGIN:
            continue  # The rest of a part that was not read.
        _, disposition = parse_options_header(events.headers().get(b"content-disposition", b""))
        filename = disposition.get(b"filename")
        yield Part(
            events,
            disposition.get(b"name", b"").decode("utf-8", "replace"),
            None if filename is None else filename.decode("utf-8", "surrogateescape"),
        )


def _bad(reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid multipart body: {reason}.", code="bad_multipart")
