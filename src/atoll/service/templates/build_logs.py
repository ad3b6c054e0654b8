"""
What builds print, kept in the blob store: the end of it, as much as settings allow.

While a build runs it is written there once a second, so that every replica can show it; the replica
that builds shows what it has just heard.
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
"""Bytes of a log that are read, unless more are kept: the setting may have been larger before."""
_STORED = re.compile(rb"(\d{1,15})\n(.*)", re.DOTALL)


class BuildLog:
    """What one build has printed; `begin` is how much of it is no longer there, in bytes."""

    def __init__(self, most: int, begin: int, data: bytes) -> None:
        self._most = most
        self.begin = begin
        self.data = bytearray(data)
        self.more = asyncio.Event()
        """Set when something was added."""

    @property
    def end(self) -> int:
        return self.begin + len(self.data)

    def say(self, data: bytes) -> None:
        self.data += data
        if (over := len(self.data) - self._most) > 0:
            del self.data[:over]
            self.begin += over
        self.more.set()

    def line(self, words: str) -> None:
        self.say(f"{words}\n".encode())

    def after(self, position: int) -> bytes:
        return bytes(self.data[max(0, position - self.begin) :])


class BuildLogs:
    def __init__(self, blobs: Blobs, most: int = MAX_SIZE) -> None:
        self._blobs = blobs
        self._most = most
        self._open: dict[tuple[str, int], BuildLog] = {}

    @contextlib.asynccontextmanager
    async def written(self, template: Template) -> AsyncIterator[BuildLog]:
        """The log of a build that begins, or goes on; in the blob store when this is left."""
        key = (template.id, template.number)
        found = await self.read(template)
        if template.build is None or template.build.attempts <= 1:
            found = BuildLog(self._most, 0, b"")  # One of the same name may have been there.
        self._open[key] = found
        ended = asyncio.Event()
        # Told to end and not cancelled: a write that was cut off could come after the last one.
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
        return BuildLog(self._most, begin, data)

    async def _stored(self, key: str) -> tuple[int, bytes]:
        """How much is no longer there, and the rest. What is no log of ours is as good as none."""
        try:
            stored = await self._blobs.get(key, limit=max(self._most, MAX_READ))
        except OversizedBlob as error:
            log.warning("build.log_damaged", error=error.message)
            return 0, b""
        found = _STORED.fullmatch(stored or b"0\n")
        if found is None:
            log.warning("build.log_damaged", error=f"{key} does not begin with a number.")
            return 0, b""
        return int(found[1]), found[2]

    def connection(self, template: Template) -> BuildLog | None:
        return self._open.get((template.id, template.number))

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
            # The build is worth more than what it printed.
            log.warning("build.log_not_written", template_id=template.id, error=error.message)


def _key(template: Template) -> str:
    return f"templates/{template.id}/{template.number}.log"
