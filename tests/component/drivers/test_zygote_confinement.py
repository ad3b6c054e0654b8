"""Zygotes that start and exit while they are confined, with a scripted executor."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from atoll.drivers.shared import processes
from atoll.drivers.shared.cgroups import ControlGroups
from atoll.drivers.shared.zygote_confinement import ZygoteConfinement
from atoll.errors import TemporaryError
from atoll.link.client import Link
from atoll.link.errors import LinkLost
from atoll.protocol import frames
from atoll.settings import LinkSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio


@dataclass
class Executor:
    """
    Sends a hello with `zygote`, and for each release the next entry of the script: events, then a
    response.
    """

    zygote: int = 10
    with_hello: list[int] = field(default_factory=list)
    """Zygotes reported together with the hello."""
    script: list[tuple[list[int], str]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    release_received: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A link may be closed before it has read all.
        with contextlib.suppress(ConnectionResetError):
            await self.talk(reader, writer)
        writer.close()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        decoder = frames.Decoder()
        while data := await reader.read(65536):
            for number, kind, payload in decoder.feed(data):
                if kind == frames.HELLO:
                    hello = {"version": frames.VERSION, "zygote": self.zygote, "runs": []}
                    message = frames.encode_json(0, frames.HELLO, hello)
                    writer.write(message + b"".join(map(self.event, self.with_hello)))
                elif kind == frames.OPEN:
                    writer.write(self.answer(number, frames.decode_json(payload)))

    @staticmethod
    def event(zygote: int) -> bytes:
        return frames.encode_json(0, frames.EVENT, {"event": "zygote", "pid": zygote})

    def answer(self, number: int, request: dict[str, Any]) -> bytes:
        self.released.append(request["zygote"])
        self.release_received.set()
        events, code = self.script.pop(0) if self.script else ([], "")
        message = b"".join(map(self.event, events))
        if code:
            return message + frames.encode_json(
                number, frames.ERROR, {"code": code, "message": code}
            )
        return message + frames.encode_json(number, frames.END, {"preload_failed": {}})


@pytest.fixture
async def executor(tmp_path: Path) -> AsyncIterator[Executor]:
    made = Executor()
    server = await asyncio.start_unix_server(made.serve, tmp_path / "link.sock")
    yield made
    server.close()


async def connected(tmp_path: Path) -> Link:
    return await Link.connect(
        str(tmp_path / "link.sock"), LinkSettings(), timeout=timedelta(seconds=60)
    )


async def until_released(executor: Executor, zygotes: list[int]) -> None:
    async with asyncio.timeout(60):
        while executor.released != zygotes:
            executor.release_received.clear()
            await executor.release_received.wait()


@pytest.mark.parametrize(
    ("script", "released"),
    [
        ([], [10]),
        ([([11], "zygote_replaced")], [10, 11]),
        ([([11, 12], "zygote_replaced")], [10, 12]),
        ([([11], "")], [10, 11]),
        ([([11], "zygote_replaced"), ([12], "zygote_replaced")], [10, 11, 12]),
    ],
    ids=["lasting", "replaced", "replaced twice", "answered for the old one", "again and again"],
)
async def test_the_newest_zygote_is_released(
    executor: Executor, tmp_path: Path, script: list[tuple[list[int], str]], released: list[int]
) -> None:
    executor.script = script
    link = await connected(tmp_path)
    assert await ZygoteConfinement(ControlGroups(), "i", link).settle() == {}
    assert executor.released == released
    link.close()
    await link.closed


async def test_a_later_zygote_is_released_too(executor: Executor, tmp_path: Path) -> None:
    link = await connected(tmp_path)
    await ZygoteConfinement(ControlGroups(), "i", link).settle()
    for zygote in (11, 12):
        executor.writer.write(executor.event(zygote))
        await until_released(executor, list(range(10, zygote + 1)))
    assert link.alive
    link.close()
    await link.closed


async def test_a_zygote_reported_too_early_requires_a_new_link(
    executor: Executor, tmp_path: Path
) -> None:
    executor.with_hello = [11]
    executor.script = [([], "zygote_replaced")]
    link = await connected(tmp_path)
    with pytest.raises(LinkLost):
        await ZygoteConfinement(ControlGroups(), "i", link).settle()
    link.close()
    await link.closed


async def test_a_later_zygote_that_cannot_be_released_closes_the_link_and_is_logged(
    executor: Executor, tmp_path: Path
) -> None:
    executor.script = [([], ""), ([], "something_else")]
    link = await connected(tmp_path)
    await ZygoteConfinement(ControlGroups(), "i", link).settle()
    with capture_logs() as logs:
        executor.writer.write(executor.event(11))
        async with asyncio.timeout(60):
            await link.closed
    assert [entry["event"] for entry in logs] == ["instance.not_confined"]


class Refusing(ControlGroups):
    """A kernel that has just seen the process end."""

    provides = frozenset({"cgroup_memory"})

    def processes(self, name: str) -> list[int]:
        return [os.getpid()]

    def confine(self, name: str, pid: int) -> None:
        raise ProcessLookupError(errno.ESRCH, "No such process")


async def test_a_zygote_that_exits_while_it_is_confined_is_a_temporary_error(
    executor: Executor, tmp_path: Path
) -> None:
    executor.zygote = processes.namespace_pid(os.getpid()) or 0
    link = await connected(tmp_path)
    with pytest.raises(TemporaryError) as caught:
        await ZygoteConfinement(Refusing(), "i", link).settle()
    assert caught.value.code == "instance_not_confined"
    assert executor.released == []
    link.close()
    await link.closed
