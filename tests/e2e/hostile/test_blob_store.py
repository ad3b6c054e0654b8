"""An attacker with write access to the blob store attacks the control plane."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import zlib
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.api import V1, Api, answer, problem
from tests.e2e.hostile.host import MiB, peak
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

GROWTH = 300 * MiB
"""Bytes by which the server may grow; each attack would take more."""
NAME = "ab" * 32
CUT = "of a checkpoint"
"""Of an answer that is cut off: the error that ended it is logged."""


@pytest.fixture(scope="module")
def server(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("store"), ATOLL_POOL__SIZE="0") as server:
        yield server


class Saved:
    """A session that has ended and left files, and its objects in the blob store."""

    def __init__(self, server: Server, api: Api) -> None:
        self._server = server
        self.id = str(api.create()["id"])
        api.put(self.id, "file", b"content")
        api.run(self.id, "pass")
        answer(api.http.post(f"{V1}/sessions/{self.id}/checkpoint"))
        api.end(self.id)
        # Answered when its last save is over.
        answer(api.http.get(f"{V1}/sessions/{self.id}/files"))
        self.place = server.data_dir / "blobs" / "workspaces" / self.id
        [self._manifest] = (self.place / "manifests").iterdir()
        self.manifest: dict[str, Any] = json.loads(self._manifest.read_bytes())

    @property
    def page(self) -> Path:
        return self.place / "data" / str(self.manifest["pages"][0][1])

    def replace(self, manifest: bytes) -> None:
        """Another manifest, of which no digest is known, as in the records of an earlier Atoll."""
        self._manifest.unlink()
        (self.place / "manifests" / "00000001").write_bytes(manifest)
        key = f"workspaces/{self.id}/manifests/00000001"
        with sqlite3.connect(self._server.data_dir / "atoll.db") as database:
            done = database.execute(
                "UPDATE checkpoints SET manifest = ? WHERE id = ?", (key, self.id)
            )
            assert done.rowcount == 1

    def replace_page(self, content: bytes) -> None:
        name = hashlib.sha256(content).hexdigest()
        (self.place / "data" / name).write_bytes(content)
        self.replace(json.dumps(self.manifest | {"pages": [["a", name]]}).encode())


def entry(path: str, kind: str = "f", size: int = 0, parts: Any = (), target: str = "") -> bytes:
    fields = [path, kind, 0o755 if kind == "d" else 0o644, size, 1, 1, 1, target, list(parts)]
    return json.dumps(fields).encode()


def page(*entries: bytes) -> bytes:
    return zlib.compress(b"\n".join(entries), 9)


def huge(*paths: Path) -> None:
    for path in paths:
        os.truncate(path, 8 << 30)


def unknown_and_huge(saved: Saved) -> None:
    saved.replace(b"{")
    huge(saved.place / "manifests" / "00000001")


CHANGES: dict[str, Callable[[Saved], None]] = {
    "a page of gigabytes": lambda saved: huge(saved.page),
    "objects of gigabytes": lambda saved: huge(*saved.place.glob("data/*")),
    "a manifest of gigabytes": lambda saved: huge(next(saved.place.glob("manifests/*"))),
    "an unknown manifest of gigabytes": unknown_and_huge,
    "a page that inflates": lambda saved: saved.replace_page(zlib.compress(bytes(600 << 20), 1)),
    "two million entries": lambda saved: saved.replace_page(
        zlib.compress(b"\n".join([entry("a")] * 2_000_000), 1)
    ),
    "nested JSON": lambda saved: saved.replace(b"[" * 10_000_000),
    "wrong types": lambda saved: saved.replace(json.dumps({**saved.manifest, "pages": 7}).encode()),
    "another session's": lambda saved: saved.replace(
        json.dumps({**saved.manifest, "session_id": "sess_other"}).encode()
    ),
    "leads up": lambda saved: saved.replace_page(page(entry("../../outside"))),
    "absolute": lambda saved: saved.replace_page(page(entry("/etc/x"))),
    "a file through a link": lambda saved: saved.replace_page(
        page(entry("a", "l", target="/tmp"), entry("a/b"))
    ),
    "a name twice": lambda saved: saved.replace_page(page(entry("a"), entry("a"))),
    "a device": lambda saved: saved.replace_page(page(entry("a", "c"))),
    "1,200 levels": lambda saved: saved.replace_page(
        page(*(entry("/".join(["d"] * depth), "d") for depth in range(1, 1200)))
    ),
    "negative size": lambda saved: saved.replace_page(page(entry("a", size=-1))),
    "a part of gigabytes": lambda saved: saved.replace_page(
        page(entry("a", size=2**33, parts=[[NAME, 0, 2**33]]))
    ),
    "an object that is not there": lambda saved: saved.replace_page(
        page(entry("a", size=10, parts=[[NAME, 0, 10]]))
    ),
    "more than the object has": lambda saved: saved.replace_page(
        page(entry("a", size=1000, parts=[[next(iter(saved.manifest["objects"])), 0, 1000]]))
    ),
    "another session's object": lambda saved: saved.replace_page(
        page(entry("a", size=10, parts=[[f"../../sess_other/data/{NAME}", 0, 10]]))
    ),
}  # fmt: skip
QUICK = ("a page of gigabytes", "a page that inflates", "a name twice")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, marks=[pytest.mark.quick] if name in QUICK else [], id=name)
        for name, change in CHANGES.items()
    ],
)
def test_a_hostile_checkpoint_is_reported_as_damaged_without_using_memory(
    server: Server, change: Any
) -> None:
    assert server.process is not None
    with server.client() as http:
        api = Api(http)
        saved = Saved(server, api)
        change(saved)
        # The node remembers records for a moment.
        server.stop()
        server.start()
    with server.client() as http:
        api = Api(http)
        before = peak(server.process.pid)
        refused = http.post(f"{V1}/sessions", json={"started_from": saved.id})
        problem(refused, 500, "checkpoint_damaged")
        for path in ("", "/a", "/file"):
            # An object that turns out to be missing in the middle ends the answer.
            with contextlib.suppress(httpx.RemoteProtocolError):
                read = http.get(f"{V1}/sessions/{saved.id}/files{path}")
                assert read.status_code in (200, 404, 409, 500), read.text
                assert read.status_code != 500 or read.json()["code"] == "checkpoint_damaged"
        assert peak(server.process.pid) - before < GROWTH
        assert not list(server.data_dir.glob("outside*"))
        # Nothing is left of it, and the server still works.
        fresh = api.create()["id"]
        assert api.run(fresh, "print(1)")["stdout"] == "1\n"
        api.end(fresh)
    traces = server.stderr().split("Traceback (most recent call last)")[1:]
    assert [trace for trace in traces if CUT not in trace] == []


def test_a_result_part_replaced_by_gigabytes_counts_as_lost_and_is_not_read(server: Server) -> None:
    assert server.process is not None
    with server.client() as http:
        api = Api(http)
        session = api.create()["id"]
        execution = api.run(session, "print('x' * 900_000)")["execution_id"]
        [kept] = (server.data_dir / "blobs" / "executions").glob(f"*/{execution}/*stdout*")
        huge(kept)
        before = peak(server.process.pid)
        result = api.result(execution)
        assert result["shortened"] == ["stdout"]
        assert set(result["stdout"]) == {"x"}
        assert peak(server.process.pid) - before < GROWTH
        api.end(session)
