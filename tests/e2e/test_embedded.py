"""Atoll inside another process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from atoll import app

pytestmark = [pytest.mark.anyio, pytest.mark.quick]


async def test_embedded_starts_at_once_leave_each_other_alone(
    bubblewrap: str, tmp_path: Path
) -> None:
    async def one() -> int:
        async with app.embedded(data_dir=tmp_path, pool={"size": 0}) as web:
            transport = httpx.ASGITransport(web)
            async with httpx.AsyncClient(transport=transport, base_url="http://atoll") as http:
                made = await http.post("/api/v1/sessions", json={})
                await http.delete(f"/api/v1/sessions/{made.json()['id']}")
                return made.status_code

    assert await asyncio.gather(*(one() for _ in range(4))) == [201] * 4
    assert list((tmp_path / "embedded").iterdir()) == []


async def test_a_node_without_bubblewrap_is_not_healthy(bubblewrap: str, tmp_path: Path) -> None:
    own = tmp_path / "bwrap"
    own.symlink_to(bubblewrap)
    settings = {"local": {"bubblewrap": str(own)}, "pool": {"size": 0}}
    async with app.embedded(data_dir=tmp_path / "data", **settings) as web:
        transport = httpx.ASGITransport(web)
        async with httpx.AsyncClient(transport=transport, base_url="http://atoll") as http:
            health = (await http.get("/api/v1/runtimes/local/health")).json()
            assert health["status"] == "healthy"
            own.unlink()
            health = (await http.get("/api/v1/runtimes/local/health")).json()
            assert health["status"] == "unhealthy"
            listed = (await http.get("/api/v1/runtimes")).json()
            assert [node["status"] for node in listed["items"]] == ["unhealthy"]
