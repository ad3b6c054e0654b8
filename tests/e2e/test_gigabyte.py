"""A gigabyte in and out through a server and an executor that cannot hold it."""

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
BLOCKS = 1024
MOST_DATA = 640 * MiB
"""Less than the file: a server that gathers it fails."""


def peak(pid: int) -> int:
    """The most memory that a process ever had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


class Capped(Server):
    prefix = ("prlimit", f"--data={MOST_DATA}")


@pytest.fixture
def capped(bubblewrap: str, tmp_path: Path) -> Iterator[Server]:
    with Capped(tmp_path, ATOLL_POOL__SIZE="0") as server:
        yield server


def blocks() -> Iterator[bytes]:
    """The same gigabyte each time, no megabyte of it like another."""
    base = random.Random(1).randbytes(MiB - 8)
    for number in range(BLOCKS):
        yield number.to_bytes(8, "big") + base


def test_a_gigabyte_goes_both_ways_in_little_memory(capped: Server) -> None:
    wanted = hashlib.sha256()

    def sent() -> Iterator[bytes]:
        for block in blocks():
            wanted.update(block)
            yield block

    with capped.client() as http:
        api = Api(http)
        session = api.create(memory="128Mi", disk="3Gi")
        inside = int(drivers.handle(capped.data_dir, session["container_id"])["child"])
        assert capped.process is not None
        before, before_inside = peak(capped.process.pid), peak(inside)
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
        assert peak(capped.process.pid) - before < 64 * MiB
        assert peak(inside) - before_inside < 16 * MiB
        api.end(session["id"])
