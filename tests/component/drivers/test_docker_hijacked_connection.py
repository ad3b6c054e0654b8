"""Connections that carry the standard streams of a relay."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from aiodocker.exceptions import DockerError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.drivers.docker.hijacked_connection import HijackedConnection
from atoll.link import transport
from atoll.link.client import Link
from atoll.link.errors import LinkLost, LinkSaturated, ProtocolViolation
from atoll.link.transport import LinkTransport
from atoll.protocol import frames
from atoll.settings import LinkSettings
from tests.fuzz.hostile import ANSWERS, HELLO

pytestmark = pytest.mark.anyio

AGREED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\n\r\n"
STDOUT, STDERR = 1, 2
PATIENCE = timedelta(seconds=20)
Engine = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def written(stream: int, data: bytes) -> bytes:
    """As an engine has it."""
    return struct.pack(">BxxxL", stream, len(data)) + data


GREETING = written(STDOUT, frames.encode_json(0, frames.HELLO, HELLO))


@asynccontextmanager
async def engine(
    place: Path, serve: Engine
) -> AsyncIterator[Callable[[LinkTransport], Awaitable[None]]]:
    """How a link dials an engine that answers so."""
    over = asyncio.Event()

    async def serve_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await serve(reader, writer)
        writer.transport.abort()
        over.set()

    async def dial(link: LinkTransport) -> None:
        hijacked = HijackedConnection("/exec/1/start", {})
        await asyncio.get_running_loop().create_unix_connection(lambda: hijacked, path)
        await hijacked.upgraded
        hijacked.carry(link)

    path = str(place / "engine.sock")
    server = await asyncio.start_unix_server(serve_once, path)
    try:
        yield dial
    finally:
        server.close()
        await asyncio.wait_for(over.wait(), 20)


async def connected(dial: Callable[[LinkTransport], Awaitable[None]]) -> Link:
    quick = LinkSettings(read_timeout=timedelta(seconds=0.1))
    return await Link.over(dial, "a container", quick, timeout=PATIENCE)


async def test_a_relay_that_floods_its_standard_error_violates_the_protocol(tmp_path: Path) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(AGREED + GREETING)
        while True:
            writer.write(written(STDERR, b"x" * 32_768))
            await writer.drain()

    async with asyncio.timeout(20), engine(tmp_path, flood) as dial:
        with suppress(ProtocolViolation):  # The flood may come before the link is made.
            link = await connected(dial)
            await link.closed
            assert isinstance(link.violation, ProtocolViolation)


async def test_a_relay_that_ended_before_its_link_is_a_lost_link(tmp_path: Path) -> None:
    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(AGREED + written(STDERR, b"the executor cannot be reached"))
        await writer.drain()

    async with asyncio.timeout(20), engine(tmp_path, end) as dial:
        with pytest.raises(LinkLost):
            await connected(dial)


async def test_some_output_on_a_relays_standard_error_is_allowed(tmp_path: Path) -> None:
    async def complain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(AGREED + written(STDERR, b"x" * 60_000) + GREETING)
        while await reader.read(65_536):
            pass

    async with asyncio.timeout(20), engine(tmp_path, complain) as dial:
        link = await connected(dial)
        assert link.violation is None
        link.close()
        await link.closed


async def test_a_relay_that_does_not_read_gets_no_more_data_and_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "CLOSE_TIMEOUT", 0.05)
    over = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(AGREED + GREETING)
        await over.wait()

    async with asyncio.timeout(20), engine(tmp_path, deaf) as dial:
        link = await connected(dial)
        for _ in range(9):
            with pytest.raises(LinkLost):
                await link.call("stat", path="x" * 2**22)
        with pytest.raises(LinkSaturated):
            await link.call("stat", path="x")
        link.close()
        await link.closed
        over.set()


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 409 Conflict\r\n\r\npaused", b"what\r\n\r\n", b"x" * 20_000],
    ids=["a refusal", "no answer", "a head that does not end"],
)
async def test_a_refused_upgrade_is_an_error(tmp_path: Path, head: bytes) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        await reader.read()

    async with asyncio.timeout(20), engine(tmp_path, refuse) as dial:
        with pytest.raises(DockerError):
            await connected(dial)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=30))
async def test_frames_are_parsed_however_the_bytes_are_split(
    tmp_path: Path, cuts: list[int]
) -> None:
    answer = frames.encode_json(1, frames.END, ANSWERS["stat"])
    pieces = [answer[start : start + 7] for start in range(0, len(answer), 7)]
    output = b"".join(
        written(STDERR, b"!") + written(STDOUT, b"") + written(STDOUT, each) for each in pieces
    )

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(AGREED + GREETING)
        data = b""
        while b'"op"' not in data:
            data += await reader.read(65_536)
        position = 0
        while position < len(output):
            for size in cuts:
                writer.write(output[position : position + size])
                await writer.drain()
                await asyncio.sleep(0)
                position += size
        await reader.read()

    async with asyncio.timeout(20), engine(tmp_path, cut) as dial:
        link = await Link.over(dial, "a container", LinkSettings(), timeout=PATIENCE)
        assert (await link.call("stat", path="a"))["entry"]["path"] == "a"
        link.close()
        await link.closed
