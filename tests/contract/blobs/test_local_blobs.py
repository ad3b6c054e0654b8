"""What files alone can go through: kills, full disks, directories that cannot be written."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from atoll.app.backends import open_blobs
from atoll.blobs.local import LocalBlobs
from atoll.clock import SystemClock
from atoll.errors import TemporaryError
from atoll.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.quick]

SIZE = 64 * 2**20
WRITER = """
import asyncio, pathlib, sys
from atoll.blobs.local import LocalBlobs

async def write():
    blobs = LocalBlobs(pathlib.Path(sys.argv[1]))
    while True:
        await blobs.put("big/object", b"n" * int(sys.argv[2]))

asyncio.run(write())
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    directory = tmp_path / "tiny"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def kill_in_the_middle(directory: Path, known: set[str]) -> None:
    """Begin to replace `big/object` by `SIZE` times "n", and die before it is done."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(directory), str(SIZE)])
    deadline = time.monotonic() + 60
    try:
        while not unfinished(directory) - known:
            assert time.monotonic() < deadline
            assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()


def unfinished(directory: Path) -> set[str]:
    """Files of puts that are not done."""
    return {path.name for path in directory.glob("big/*#*")}


async def test_a_kill_during_a_put_leaves_the_old_or_the_new_object(directory: Path) -> None:
    blobs = LocalBlobs(directory)
    old, new = b"old", b"n" * SIZE
    await blobs.put("big/object", old)

    for _ in range(4):
        await asyncio.to_thread(kill_in_the_middle, directory, unfinished(directory))
        assert await blobs.get("big/object") in (old, new)


async def test_leftovers_of_a_kill_block_nothing_and_are_removed_with_their_directory(
    directory: Path,
) -> None:
    blobs = LocalBlobs(directory)
    await blobs.put("big/object", b"old")
    await asyncio.to_thread(kill_in_the_middle, directory, set())
    left = directory / "big" / "object#1"
    left.write_bytes(b"half")  # As every kill in the middle leaves it; that one may have been late.

    await blobs.put("big/object", b"after")

    assert await blobs.get("big/object") == b"after"
    assert left.read_bytes() == b"half"
    await blobs.remove("big/object")
    assert await blobs.get("big/object") is None
    await blobs.remove_all("big/")
    assert os.listdir(directory) == []


async def test_a_full_disk_is_a_temporary_error_and_keeps_the_old_object(tiny: Path) -> None:
    blobs = LocalBlobs(tiny / "blobs")
    await blobs.put("a/old", b"old")

    for key in ("a/old", "a/new"):
        with pytest.raises(TemporaryError, match="No space left") as caught:
            await blobs.put(key, b"n" * 2**21)
        assert caught.value.code == "blobs_unavailable"
        assert "\n" not in caught.value.message

    assert await blobs.get("a/old") == b"old"
    assert await blobs.get("a/new") is None
    assert [path.name for path in (tiny / "blobs" / "a").iterdir()] == ["old"]
    await blobs.put("a/old", b"room again")
    assert await blobs.get("a/old") == b"room again"


async def test_a_directory_that_cannot_be_created_is_a_temporary_error(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_text("in the way")
    blobs = LocalBlobs(tmp_path / "blobs")

    for call in (blobs.put("a", b""), blobs.get("a"), blobs.remove("a"), blobs.remove_all("a/")):
        with pytest.raises(TemporaryError) as caught:
            await call
        assert caught.value.code == "blobs_unavailable"

    (tmp_path / "blobs").unlink()
    await blobs.put("a", b"1")
    assert await blobs.get("a") == b"1"


async def test_another_process_finds_the_blobs_and_other_users_do_not(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    await open_blobs(settings, SystemClock()).put("a/b", b"1")

    assert await open_blobs(settings, SystemClock()).get("a/b") == b"1"
    assert (tmp_path / "blobs").stat().st_mode & 0o777 == 0o700


async def test_no_directory_is_created_before_the_first_use(tmp_path: Path) -> None:
    await open_blobs(Settings(data_dir=tmp_path), SystemClock()).remove_all("a/")

    assert os.listdir(tmp_path) == []


def test_obstore_is_imported_only_by_the_first_use() -> None:
    program = (
        "import sys, atoll, atoll.app.application, atoll.service.executions.offload\n"
        "from atoll.app.backends import open_blobs\n"
        "from atoll.clock import SystemClock\n"
        "from atoll.settings import BlobSettings, Settings\n"
        "open_blobs(Settings(), SystemClock())\n"
        "open_blobs(Settings(blob=BlobSettings(url='s3://bucket')), SystemClock())\n"
        "sys.exit('obstore' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
