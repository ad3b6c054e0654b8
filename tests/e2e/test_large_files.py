"""A file in and out through a server and an executor that hold only a part of it."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import drivers
from tests.e2e.api import V1, Api, answer
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

MiB = 1024 * 1024
BLOCKS = 256


def peak(pid: int) -> int:
    """The most memory that a process ever had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@pytest.fixture
def own(bubblewrap: str, tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path, ATOLL_POOL__SIZE="0") as server:
        yield server


def blocks() -> Iterator[bytes]:
    """The same file each time, no megabyte of it like another."""
    base = random.Random(1).randbytes(MiB - 8)
    for number in range(BLOCKS):
        yield number.to_bytes(8, "big") + base


def test_a_large_file_is_uploaded_and_downloaded_in_little_memory(own: Server) -> None:
    wanted = hashlib.sha256()

    def sent() -> Iterator[bytes]:
        for block in blocks():
            wanted.update(block)
            yield block

    with own.client() as http:
        api = Api(http)
        session = api.create(memory="128Mi", disk="1Gi")
        inside = int(drivers.handle(own.data_dir, session["container_id"])["child"])
        assert own.process is not None
        before, before_inside = peak(own.process.pid), peak(inside)
        url = f"{V1}/sessions/{session['id']}/files/big"
        assert answer(http.put(url, content=sent()), 201)["size"] == BLOCKS * MiB
        got = hashlib.sha256()
        with http.stream("GET", url) as response:
            assert response.headers["content-length"] == str(BLOCKS * MiB)
            for piece in response.iter_raw(MiB):
                got.update(piece)
        assert got.hexdigest() == wanted.hexdigest()
        part = http.get(url, headers={"Range": f"bytes={BLOCKS * MiB - 5}-"})
        assert (part.status_code, len(part.content)) == (206, 5)
        assert peak(own.process.pid) - before < 64 * MiB
        assert peak(inside) - before_inside < 16 * MiB
        api.end(session["id"])
