"""The sweep that removes orphaned containers, on a real Docker engine."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from atoll import ids
from atoll.drivers.docker.driver import DockerDriver
from atoll.reconcile.orphaned_instances import ORPHAN_AGE
from atoll.settings import DockerSettings, Settings
from tests.component.reconcile.test_orphans import environment
from tests.e2e.test_docker import create_orphan, names
from tests.servers.images import PYTHON

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.docker import Dockerd

pytestmark = pytest.mark.anyio


async def test_an_orphaned_container_is_removed_after_a_delay(
    dockerd: Dockerd, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path)
    engine = DockerSettings(url=dockerd.url, image=PYTHON)
    driver = DockerDriver(tmp_path, engine, settings.link, settings.local)
    await driver.open()
    orphan, stranger = ids.instance_id(), ids.instance_id()
    create_orphan(dockerd, orphan, (tmp_path / "node" / "docker-name").read_text())
    create_orphan(dockerd, stranger, "somebody else's")
    try:
        async with environment(tmp_path, driver=driver) as found:
            await found.sweep.once()
            assert {orphan, stranger} <= names(dockerd), "it may be on its way to somebody"
            found.clock.time += timedelta(seconds=ORPHAN_AGE)
            await found.sweep.once()
        assert orphan not in names(dockerd)
        assert stranger in names(dockerd)
    finally:
        await driver.close()
        dockerd.remove(f"atoll-{stranger}")
