"""
Logs of template builds. The end of each log is stored in the blob store.

While a build runs, its log is stored once a second, so that every replica can show it. The replica
that builds shows it without delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING

import structlog

from atoll.blobs.base import OversizedBlob
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.blobs.base import Blobs
    from atoll.model.template import Template

log = structlog.get_logger(__name__)

WRITE_SECONDS = 1.0
MAX_SIZE = 256 * 1024
"""Bytes kept of the end of a log."""
MAX_READ = 16 * 1024 * 1024
"""Bytes of a stored log that are read at most: an earlier version may have stored longer logs."""
_STORED = re.compile(rb"(\d{1,15})\n(.*)", re.DOTALL)


class BuildLog:
    """The output of one build; its first `begin` bytes were dropped."""

    def __init__(self, max_size: int, begin: int, data: bytes) -> None:
        self._max_size = max_size
        self.begin = begin
        self.data = bytearray(data)
        self.more = asyncio.Event()
        """Set when output is added."""

    @property
    def end(self) -> int:
        return self.begin + len(self.data)

    def write(self, data: bytes) -> None:
        self.data += data
        if (over := len(self.data) - self._max_size) > 0:
            del self.data[:over]
            self.begin += over
        self.more.set()

    def line(self, words: str) -> None:
        self.write(f"{words}\n".encode())

    def after(self, position: int) -> bytes:
        return bytes(self.data[max(0, position - self.begin) :])


class BuildLogs:
    def __init__(self, blobs: Blobs, max_size: int = MAX_SIZE) -> None:
        self._blobs = blobs
        self._max_size = max_size
        self._open: dict[tuple[str, int], BuildLog] = {}

    @contextlib.asynccontextmanager
    async def writing(self, template: Template) -> AsyncIterator[BuildLog]:
        """The log of an attempt, which is stored when the context is left."""
        key = (template.id, template.number)
        found = await self.read(template)
        if template.build is None or template.build.attempts <= 1:
            found = BuildLog(self._max_size, 0, b"")  # The old one is of a removed template.
        self._open[key] = found
        ended = asyncio.Event()
        # Not cancelled: an interrupted write could overwrite the last one.
        writing = asyncio.create_task(self._write_often(template, found, ended))
        try:
            yield found
        finally:
            ended.set()
            await asyncio.shield(writing)
            self._open.pop(key, None)
            found.more.set()

    async def read(self, template: Template) -> BuildLog:
        found = self._open.get((template.id, template.number))
        if found is not None:
            return found
        begin, data = await self._stored(_key(template))
        return BuildLog(self._max_size, begin, data)

    async def _stored(self, key: str) -> tuple[int, bytes]:
        """Number of dropped bytes, and the rest; a malformed log counts as empty."""
        try:
            stored = await self._blobs.get(key, limit=max(self._max_size, MAX_READ))
        except OversizedBlob as error:
            log.warning("build.log_damaged", error=error.message)
            return 0, b""
        found = _STORED.fullmatch(stored or b"0\n")
        if found is None:
            log.warning("build.log_damaged", error=f"{key} does not begin with a number.")
            return 0, b""
        return int(found[1]), found[2]

    async def forget(self, template_id: str) -> None:
        await self._blobs.remove_all(f"templates/{template_id}/")

    async def drop(self, template: Template) -> None:
        await self._blobs.remove(_key(template))

    async def _write_often(self, template: Template, found: BuildLog, ended: asyncio.Event) -> None:
        written = -1
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WRITE_SECONDS):
                    await ended.wait()
            if found.end != written:
                written = found.end
                await self._write(template, found)

    async def _write(self, template: Template, found: BuildLog) -> None:
        try:
            await self._blobs.put(_key(template), b"%d\n%b" % (found.begin, bytes(found.data)))
        except TemporaryError as error:
            # A lost log must not fail the build.
            log.warning("build.log_not_written", template_id=template.id, error=error.message)


def _key(template: Template) -> str:
    return f"templates/{template.id}/{template.number}.log"
