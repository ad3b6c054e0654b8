"""Out-of-memory events of an engine on another machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from atoll.drivers.docker.container_memory import ContainerMemory
from atoll.drivers.docker.engine import Engine
from atoll.drivers.docker.labels import Label
from atoll.settings import DockerSettings

pytestmark = pytest.mark.anyio


def killed(instance_id: str, **labels: str) -> bytes:
    """An event as engines send it: with all labels of the container's image."""
    about = {"Actor": {"Attributes": {Label.INSTANCE: instance_id, **labels}}}
    return json.dumps(about).encode() + b"\n"


@asynccontextmanager
async def engine(place: Path, *events: bytes) -> AsyncIterator[Engine]:
    """A server that sends these events once, to its first client."""
    left = [b"".join(events)]

    async def send(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while left:
            await answer.write(left.pop())
        await over.wait()
        return answer

    async def describe(request: web.Request) -> web.Response:
        return web.json_response({"ApiVersion": "1.41"})

    over = asyncio.Event()
    app = web.Application()
    app.router.add_get("/v1.41/events", send)
    app.router.add_get("/{path:.*}", describe)
    runner = web.AppRunner(app)
    await runner.setup()
    path = str(place / "engine.sock")
    await web.UnixSite(runner, path).start()
    made = Engine(DockerSettings(url=f"unix://{path}"))
    try:
        await made.open()
        yield made
    finally:
        over.set()
        await made.close()
        await runner.cleanup()


async def test_events_with_long_labels_do_not_hide_other_events(tmp_path: Path) -> None:
    wordy: dict[str, Any] = {"words": "x" * 1_000_000}
    events = (killed("inst_1", **wordy), killed("inst_2"))
    async with engine(tmp_path, *events) as found:
        memory = ContainerMemory(found, "node", tmp_path)
        for instance_id in ("inst_1", "inst_2"):
            memory.add(instance_id, "no container", 1)
        memory.open()
        try:
            assert await memory.killed("inst_2")
            assert await memory.killed("inst_1")
        finally:
            await memory.close()
