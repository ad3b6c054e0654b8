"""The composition root's own work: directories of embedded Atolls, and the first key."""

from __future__ import annotations

import asyncio
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from atoll.app import api_keys, data_directory, replica
from atoll.errors import TemporaryError
from atoll.settings import LocalSettings, Settings

LOCAL = LocalSettings()


def test_a_start_between_creating_and_locking_a_directory_removes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = fcntl.flock
    inner: list[Path] = []

    def flock(fd: int, operation: int) -> None:
        if not inner and operation == fcntl.LOCK_EX:
            inner.append(tmp_path)  # Once.
            with data_directory.own_directory(tmp_path, LOCAL) as other:
                inner[0] = other
                assert other.is_dir()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with data_directory.own_directory(tmp_path, LOCAL) as directory:
        assert inner != [tmp_path]
        (directory / "used").touch()


def test_many_concurrent_starts_each_get_a_directory(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        held = list(pool.map(lambda _: data_directory.own_directory(tmp_path, LOCAL), range(64)))
    places = []
    for one in held:
        with one as place:
            places.append(place)
            assert place.is_dir()
    assert len(set(places)) == 64


def test_directories_of_a_dead_process_are_removed_whatever_their_depth_and_permissions(
    tmp_path: Path,
) -> None:
    dead = tmp_path / "dead"
    closed = dead / "node" / "closed"
    (closed / "inner").mkdir(parents=True)
    (closed / "inner" / "file").touch()
    here = os.open(dead, os.O_DIRECTORY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    (closed / "inner").chmod(0)
    closed.chmod(0)

    with data_directory.own_directory(tmp_path, LOCAL) as directory:
        assert list(tmp_path.iterdir()) == [directory]


def test_a_directory_that_cannot_be_removed_is_logged_and_does_not_prevent_a_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "a file").touch()
    with capture_logs() as logs, data_directory.own_directory(tmp_path, LOCAL) as directory:
        assert directory.is_dir()
    assert [entry["event"] for entry in logs] == ["embedded.not_removed"]


@pytest.mark.anyio
async def test_a_key_no_longer_set_in_the_environment_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.service.auth.service.REFRESH_TIMEOUT", 60.0)
    old, new = "the-old-secret-key", "the-new-secret-key"
    async with api_keys.keys(Settings(data_dir=tmp_path)) as keys:
        for secret in (old, old, new, new):
            assert (
                await api_keys.ensure_first_key(Settings(data_dir=tmp_path, api_key=secret), keys)
                is None
            )
            assert await keys.find(secret) is not None
            assert [key.name for key in await keys.list()] == ["environment"]
        assert await keys.find(old) is None

        path = await api_keys.ensure_first_key(Settings(data_dir=tmp_path), keys)
        assert path is not None
        assert [key.name for key in await keys.list()] == ["first"]
        assert await keys.find(new) is None


@pytest.mark.anyio
async def test_an_embedded_atoll_closes_its_parts_concurrently() -> None:
    """Each of them ends only when all the others are about to: in turn they never would."""
    everyone = asyncio.Barrier(4)

    async def loop() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await everyone.wait()

    async def finish() -> None:
        await everyone.wait()

    loops = [asyncio.create_task(loop()) for _ in range(2)]
    await asyncio.sleep(0)  # They run, and have something to finish.
    async with asyncio.timeout(60):
        await replica._stop(loops, finish, finish)


@pytest.mark.anyio
async def test_a_part_that_fails_to_close_does_not_prevent_others() -> None:
    done = []

    async def fail() -> None:
        raise TemporaryError("The database is away.")

    async def finish() -> None:
        await asyncio.sleep(0)
        done.append("end")

    with pytest.raises(TemporaryError):
        await replica._stop([], fail, finish)
    assert done == ["end"]
