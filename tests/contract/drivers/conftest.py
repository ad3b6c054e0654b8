"""A driver of each kind on a node of its own. Another kind adds its fixture to `KINDS`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from atoll import ids
from atoll.drivers.local.driver import LocalDriver
from atoll.model.instance import Handle, InstanceSpec
from atoll.model.resources import Resources
from atoll.model.template import Template
from atoll.settings import LinkSettings, LocalSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.drivers.base import Driver
    from atoll.link.client import Link

MiB = 1024 * 1024
LIMITS = Resources(cpu=1.0, memory=128 * MiB, disk=16 * MiB, max_processes=32)


def local_driver(data_dir: Path) -> Driver:
    return LocalDriver(data_dir, LocalSettings(), LinkSettings())


KINDS = {"local": local_driver}


def template(**fields: Any) -> Template:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    base: dict[str, Any] = {
        "id": f"t{ids.instance_id()}", "name": "t", "created_at": now, "updated_at": now,
        "default_resources": LIMITS,
    }  # fmt: skip
    return Template(**(base | fields))


def spec(**fields: Any) -> InstanceSpec:
    base: dict[str, Any] = {
        "instance_id": ids.instance_id(), "template": template(), "resources": LIMITS,
    }  # fmt: skip
    return InstanceSpec(**(base | fields))


class Node:
    """A machine with a driver on it, which can be let go of and taken over by a new one."""

    def __init__(self, kind: str, data_dir: Path) -> None:
        self.kind = kind
        self.data_dir = data_dir
        self.driver: Driver = KINDS[kind](data_dir)

    async def take_over(self) -> Driver:
        """As after the end of the process: a new driver that knows only what the node knows."""
        await self.driver.close()
        self.driver = KINDS[self.kind](self.data_dir)
        await self.driver.open()
        return self.driver

    async def clear(self) -> None:
        for handle in await self.driver.handles():
            await self.driver.destroy(handle)
        for workspace in await self.driver.workspaces():
            await self.driver.discard(workspace)
        await self.driver.close()


@pytest.fixture(params=sorted(KINDS))
async def node(
    request: pytest.FixtureRequest, bubblewrap: str, tmp_path: Path
) -> AsyncIterator[Node]:
    made = Node(request.param, tmp_path / "data")
    await made.driver.open()
    yield made
    await made.clear()


class Heard:
    """What a run said, in the order it came."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, bytes]] = []

    def started(self) -> None: ...

    def heartbeat(self) -> None: ...

    def output(self, sequence: int, channel: int, data: bytes) -> None:
        self.pieces.append((sequence, channel, data))

    @property
    def stdout(self) -> bytes:
        return b"".join(data for _, channel, data in self.pieces if channel == 1)

    @property
    def last(self) -> int:
        return self.pieces[-1][0] if self.pieces else 0


def job(driver: Driver, code: str, **fields: Any) -> dict[str, Any]:
    limits, watch = driver.run_limits(LIMITS)
    base: dict[str, Any] = {
        "id": ids.instance_id(), "kind": "python", "code": code, "command": None, "event": {},
        "stdin": None, "args": [], "env": {}, "cwd": "/workspace", "timeout": 30.0,
        "output_limit": MiB, "return_limit": MiB, "artifact_limit": 100, "limits": limits,
        "watch": watch,
    }  # fmt: skip
    return base | fields


async def printed(driver: Driver, link: Link, code: str) -> str:
    heard = Heard()
    result = await link.run(job(driver, code), heard)
    assert result["exit_code"] == 0, (result, heard.pieces)
    return heard.stdout.decode().strip()


async def started(driver: Driver, wanted: InstanceSpec) -> tuple[Handle, Link]:
    handle = await driver.ensure(wanted)
    return handle, await driver.connect(handle)
