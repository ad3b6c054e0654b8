"""The real link against an executor that sends a given script."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from atoll.errors import AtollError
from atoll.link.client import Link, Piece
from atoll.link.output import LINES_MARGIN, VALUE_MARGIN
from atoll.protocol import frames
from atoll.settings import LinkSettings
from tests.executors import job
from tests.fuzz.hostile import HELLO, OWN, Said, say
from tests.runs import run_over

LIMIT = 100_000
Script = Callable[[str], list[Said]]
"""Frames sent in response to a request, by its name."""
GREETING = say(frames.HELLO, HELLO, 0)


class RunOutput:
    """Keeps what it is given, and counts it."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def started(self) -> None: ...

    def output(self, sequence: int, channel: int, data: bytes) -> None:
        self.sizes[channel] = self.sizes.get(channel, 0) + len(data)

    def heartbeat(self) -> None: ...


class Executor:
    """Answers each request by its script, and hangs up."""

    def __init__(self, script: Script, greeting: Said, *, stays: bool = False) -> None:
        self._script = script
        self._greeting = greeting
        self._stays = stays
        self.over = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The link may have hung up first.
        with suppress(ConnectionError):
            await self._talk(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        self.over.set()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = frames.Decoder()
        while data := await reader.read(65_536):
            for stream, kind, payload in decoder.feed(data):
                if kind == frames.HELLO:
                    writer.write(self._greeting.encoded(0))
                elif kind == frames.OPEN:
                    for message in self._script(frames.decode_json(payload)["op"]):
                        writer.write(message.encoded(stream))
                        await writer.drain()
                    if not self._stays:
                        return


@asynccontextmanager
async def linked(
    script: Script, greeting: Said = GREETING, *, stays: bool = False
) -> AsyncIterator[Link]:
    with tempfile.TemporaryDirectory(prefix="atoll-link-") as directory:
        path = str(Path(directory, "link.sock"))
        executor = Executor(script, greeting, stays=stays)
        server = await asyncio.start_unix_server(executor.serve, path)
        settings = LinkSettings(read_timeout=timedelta(seconds=20))
        try:
            link = await Link.connect(path, settings, timeout=timedelta(seconds=20))
            try:
                yield link
            finally:
                link.close()
                await link.closed
        finally:
            server.close()
            await executor.over.wait()


async def request(link: Link, op: str, heard: RunOutput) -> Any:
    """One request of a kind; what came of it."""
    if op == "run":
        wanted = job("exec_1", "1", output_limit=LIMIT, return_limit=LIMIT)
        return await run_over(link, wanted, heard)
    if op == "attach":
        return [item async for item in link.watch("exec_1", 0)]
    if op in ("read", "pack", "follow"):
        first, content = (
            await link.read("a") if op == "read" else await link.fetch(op, path="a", form="tar")
        )
        return [first, sum([len(piece) async for piece in content])]
    if op in ("scan", "collect"):
        return [item async for item in link.pull(op, paths=["a"])]
    if op in ("write", "unpack"):
        return await link.push(op, _content(), path="a")
    return await link.call(op, path="a", id="ctx_1")


async def _content() -> AsyncIterator[bytes]:
    for _ in range(8):
        yield b"x" * 65_536


async def play(op: str, script: list[Said], greeting: Said = GREETING) -> None:
    """
    For any input the request ends, with a verified response or with one of our own errors, and the
    loop keeps running.
    """
    broken: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
    output = RunOutput()
    try:
        async with asyncio.timeout(30), linked(lambda _: script, greeting) as link:
            clean(await request(link, op, output))
    except AtollError as error:
        clean([error.code, error.message])
    assert broken == []
    for channel, size in output.sizes.items():
        margin = {frames.STDOUT: 0, frames.STDERR: 0, frames.VALUE: VALUE_MARGIN}
        assert size <= LIMIT + margin.get(channel, LINES_MARGIN)


def clean(value: Any) -> None:
    """Any JSON, and text except for the bytes of names."""
    if isinstance(value, bytes | Piece):
        return
    if isinstance(value, list):
        for item in value:
            clean(item)
        return
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    text.encode("utf-8", "surrogateescape")


__all__ = ["GREETING", "OWN", "Executor", "RunOutput", "linked", "play", "request"]
