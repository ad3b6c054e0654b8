"""Messages of an executor about its workspace are not trusted."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from atoll.blobs.local import LocalBlobs
from atoll.errors import AtollError
from atoll.link.client import Link
from atoll.link.errors import LinkLost
from atoll.protocol import frames
from atoll.service.checkpoints.chunks import ChunkStore
from atoll.service.checkpoints.writer import CheckpointWriter
from atoll.settings import LinkSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

Said = bytes | dict[str, Any]
HELLO = {"version": 1, "zygote": 2, "runs": []}
GOOD: list[Any] = ["a", "f", 0o644, 5, 1, 1, 1]


def with_(**changed: Any) -> list[Any]:
    names = ("path", "kind", "mode", "size", "modified", "changed", "inode")
    return [changed.get(name, value) for name, value in zip(names, GOOD, strict=True)]


def lines(*entries: Any) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


@asynccontextmanager
async def liar(
    place: Path, scan: list[Said], collect: list[Said], patience: float = 30
) -> AsyncIterator[Link]:
    """A link to a fake executor that sends a valid hello, and then the configured messages."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = frames.Decoder()
        while data := await reader.read(65_536):
            for stream, kind, payload in decoder.feed(data):
                if kind == frames.HELLO:
                    writer.write(frames.encode_json(0, frames.HELLO, HELLO))
                elif kind == frames.OPEN:
                    op = frames.decode_json(payload)["op"]
                    if op == "populate":
                        continue  # It neither reads nor answers.
                    for output in scan if op == "scan" else collect:
                        if isinstance(output, bytes):
                            writer.write(frames.encode(stream, frames.DATA, output))
                        else:
                            writer.write(frames.encode_json(stream, frames.EVENT, output))
                    writer.write(frames.encode_json(stream, frames.END, {}))
            await writer.drain()
        writer.close()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):  # The link hangs up on a liar.
            await serve(reader, writer)

    server = await asyncio.start_unix_server(served, place / "link.sock")
    settings = LinkSettings(read_timeout=timedelta(seconds=patience))
    link = await Link.connect(str(place / "link.sock"), settings, timeout=timedelta(seconds=10))
    try:
        yield link
    finally:
        link.close()
        await link.closed
        server.close()


FILE = {"event": "file", "index": 0, "entry": GOOD}
OVER = {"event": "over", "index": 0, "same": True}

SCANS: dict[str, list[Said]] = {
    "no JSON": [b"what\n"],
    "very deep JSON": [b"[" * 200_000 + b"\n"],
    "no list": [lines({"path": "a"})],
    "too few fields": [lines(["a", "f"])],
    "a path that leads out": [lines(with_(path="../a"))],
    "a path that leads out in the middle": [lines(with_(path="a/../../b"))],
    "an absolute path": [lines(with_(path="/etc/passwd"))],
    "no path": [lines(with_(path=""))],
    "a NUL": [lines(with_(path="a\0b"))],
    "a path without end": [lines(with_(path="a" * 100_000))],
    "a line without end": [b"x" * 65_536] * 64,
    "the same twice": [lines(GOOD, GOOD)],
    "out of order": [lines(with_(path="b"), GOOD)],
    "a size below nothing": [lines(with_(size=-1))],
    "a size that no file has": [lines(with_(size=2**70))],
    "an infinite size": [b'["a","f",420,1e999,1,1,1]\n'],
    "a mode that is none": [lines(with_(mode=1 << 40))],
    "another kind": [lines(with_(kind="device"))],
}
COLLECTS: dict[str, list[Said]] = {
    "data of nothing": [b"data"],
    "more than the file has": [FILE, b"123456", OVER],
    "a hole larger than memory": [FILE, {"event": "hole", "length": 1 << 50}, OVER],
    "a hole below nothing": [FILE, {"event": "hole", "length": -5}, OVER],
    "a hole in nothing": [{"event": "hole", "length": 5}],
    "a file that was not asked for": [{**FILE, "entry": with_(path="b")}, b"12345", OVER],
    "an index of nothing": [{**FILE, "index": 7}, b"12345", {**OVER, "index": 7}],
    "an index from the end": [{"event": "gone", "index": -1}],
    "no index": [{"event": "gone"}],
    "an entry that is none": [{"event": "file", "index": 0, "entry": 5}],
}


async def captured(place: Path, scan: list[Said], collect: list[Said]) -> CheckpointWriter:
    async with liar(place, scan, collect) as link:
        capture = CheckpointWriter(link, ChunkStore(LocalBlobs(place / "blobs"), "sess_1"), None)
        async with asyncio.timeout(30):
            await capture.run()
        return capture


@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS.keys())
async def test_an_invalid_scan_is_an_error_of_the_executor(
    tmp_path: Path, scan: list[Said]
) -> None:
    with pytest.raises(AtollError) as refused:
        await captured(tmp_path, scan, [FILE, b"12345", OVER])
    assert refused.value.code == "protocol_violation"


@pytest.mark.parametrize("collect", COLLECTS.values(), ids=COLLECTS.keys())
async def test_invalid_contents_are_an_error_of_the_executor(
    tmp_path: Path, collect: list[Said]
) -> None:
    with pytest.raises(AtollError) as refused:
        await captured(tmp_path, [lines(GOOD)], collect)
    assert refused.value.code == "protocol_violation"


async def test_a_valid_message_is_accepted(tmp_path: Path) -> None:
    capture = await captured(tmp_path, [lines(GOOD)], [FILE, b"12345", OVER])

    assert (capture.files, capture.size, capture.settled) == (1, 5, True)


async def test_an_executor_that_does_not_accept_files_times_out(tmp_path: Path) -> None:
    async def content() -> AsyncIterator[bytes]:
        while True:
            yield bytes(2**20)

    async with liar(tmp_path, [], [], patience=0.1) as link:
        async with asyncio.timeout(30):  # Else a defect would be a test that never ends.
            with pytest.raises(LinkLost):
                await link.push("populate", content())
