"""Atoll inside another process."""

from __future__ import annotations

import asyncio
import os
import secrets
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from atoll import Atoll
from atoll.app.embedded import embedded
from tests.e2e.hostile.host import eventually
from tests.host_processes import below, processes

pytestmark = [pytest.mark.anyio, pytest.mark.quick]


async def test_concurrent_starts_of_embedded_atoll_are_independent(
    bubblewrap: str, tmp_path: Path
) -> None:
    async def one() -> int:
        async with embedded(data_dir=tmp_path, pool={"size": 0}) as web:
            transport = httpx.ASGITransport(web)
            async with httpx.AsyncClient(transport=transport, base_url="http://atoll") as http:
                made = await http.post("/api/v1/sessions", json={})
                await http.delete(f"/api/v1/sessions/{made.json()['id']}")
                return made.status_code

    assert await asyncio.gather(*(one() for _ in range(4))) == [201] * 4
    assert list((tmp_path / "embedded").iterdir()) == []


def attached(place: Path) -> list[str]:
    """Images of this directory that loop devices have, removed ones too."""
    found = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # A device without a backing file.
            found.append(file.read_text())
    return [image for image in found if image.startswith(str(place))]


def children() -> set[int]:
    """Of this process, with those that have ended and were not waited for."""
    return {pid for pid, (parent, _, _) in processes().items() if parent == os.getpid()}


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param("", id="before the pool is filled"),
        pytest.param("workspaces/*", id="while workspaces are made"),
        pytest.param("instances/*/link.sock", id="while processes are started"),
        pytest.param("instances/*/handle.json", id="while executors are connected to"),
        pytest.param(None, id="while code runs"),
    ],
)
def test_an_embedded_atoll_leaves_nothing_whenever_it_is_closed(
    bubblewrap: str, tmp_path: Path, pattern: str | None
) -> None:
    name, before = f"atoll-test-{secrets.token_hex(4)}", below(os.getpid()) | children()
    with Atoll(data_dir=tmp_path, local={"cgroup_name": name}) as atoll:
        if pattern is None:
            atoll.sessions.create().submit("import time; time.sleep(600)")
        elif pattern:
            eventually(lambda: any(tmp_path.glob(f"embedded/*/node/{pattern}")), pattern)
    assert list((tmp_path / "embedded").iterdir()) == []
    assert below(os.getpid()) | children() <= before
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    groups = [path for path, _, _ in os.walk("/sys/fs/cgroup") if f"/{name}-" in path]
    assert groups == []
    # The kernel detaches a device a moment after the last process that had it is gone.
    eventually(lambda: not attached(tmp_path), "the end of the loop devices")


async def test_a_node_without_bubblewrap_is_not_healthy(bubblewrap: str, tmp_path: Path) -> None:
    own = tmp_path / "bwrap"
    own.symlink_to(bubblewrap)
    settings = {"local": {"bubblewrap": str(own)}, "pool": {"size": 0}}
    async with embedded(data_dir=tmp_path / "data", **settings) as web:
        transport = httpx.ASGITransport(web)
        async with httpx.AsyncClient(transport=transport, base_url="http://atoll") as http:
            health = (await http.get("/api/v1/runtimes/local/health")).json()
            assert health["status"] == "healthy"
            own.unlink()
            health = (await http.get("/api/v1/runtimes/local/health")).json()
            assert health["status"] == "unhealthy"
            listed = (await http.get("/api/v1/runtimes")).json()
            assert [node["status"] for node in listed["items"]] == ["unhealthy"]
