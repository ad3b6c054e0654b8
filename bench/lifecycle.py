"""
`make bench-lifecycle`: sessions that stop, come back, stand still, are copied, move, and rest.

Loopback only. Needs an otherwise idle machine to mean anything; with few rounds, p99 is the slowest
of them. What Atoll does is shown beside the least that this machine needs for the same: a copy of
the files, a process that is started, a group that is frozen by hand.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.api import Api, eventually
from tests.integration.nodes import Fleet
from tests.servers.s3 import S3Server

from atoll import ids
from atoll.model.resources import Resources
from atoll.model.session import Session, SessionStatus, Wanted
from atoll.settings import DatabaseSettings, SqliteSettings
from atoll.stores.sql.store import SqlStore
from bench import processes
from bench.__main__ import create, delete, run
from bench.measure import samples
from bench.report import Report, Way, parser
from bench.server import Server

if TYPE_CHECKING:
    import argparse

    from bench.client import Client

PARTS = ("stop", "archive", "pause", "clone", "move", "rest")
FILL = """
import os
with open("large", "wb") as file:
    for _ in range({size}):
        file.write(os.urandom(1 << 20))
"""
FIXED = {"ATOLL_POOL__SIZE": "0"}
KEPT = {"timeout": 86_000}


def arguments() -> argparse.Namespace:
    options = parser("lifecycle", __doc__)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--size", type=int, default=1024, help="of a workspace, in MiB")
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--moved", type=int, default=20, help="sessions on the node that is lost")
    options.add_argument("--resting", type=int, default=10_000, help="sessions at rest")
    options.add_argument("--seconds", type=float, default=30, help="that they are watched for")
    return options.parse_args()


class One:
    """A session, and what is done with it."""

    def __init__(self, client: Client, **body: object) -> None:
        self._client = client
        self.id = create(client, **KEPT, **body)

    def do(self, verb: str) -> None:
        self._client.call("POST", f"/api/v1/sessions/{self.id}/{verb}?wait=300")

    def run(self, code: str = "1") -> None:
        run(self._client, self.id, code)

    def clone(self) -> str:
        found = self._client.call("POST", f"/api/v1/sessions/{self.id}/clone")
        return str(found["id"])

    def end(self) -> None:
        delete(self._client, self.id)


def process() -> None:
    subprocess.run(["python3", "-c", "1"], check=True)


def stops(report: Report, rounds: int) -> None:
    report.section("a session stopped, and started again")
    with Server(**FIXED) as server:
        client = server.client()
        one = One(client)
        one.run("open('file', 'w').write('there')")
        made: list[str] = []

        def cold() -> None:
            made.append(create(client))

        def clear() -> None:
            while made:
                delete(client, made.pop())

        report.turns(
            [
                Way("python3 -c 1", process),
                Way("create, nothing ready", cold, clear),
                Way("stop", partial(one.do, "stop"), partial(one.do, "start"), ours=True),
                Way("start from stopped", partial(one.do, "start"), ours=True),
                Way("execute in a stopped one", one.run, partial(one.do, "stop"), ours=True),
            ],
            rounds,
        )


def archives(report: Report, place: Path, size: int, rounds: int) -> None:
    report.section(f"a workspace of {size} MiB archived, and started from there")
    source, copy = place / "large", place / "copy"
    with source.open("wb") as file:
        for _ in range(size):
            file.write(os.urandom(1 << 20))
    disk = {"disk": f"{size * 2 + 64}Mi"}
    with ExitStack() as stack:
        s3 = stack.enter_context(S3Server(place))
        client = stack.enter_context(Server(**FIXED)).client()
        remote = stack.enter_context(Server(**FIXED, **s3.environment())).client()
        ways = [Way("cp of the same file", partial(shutil.copyfile, source, copy))]
        for name, found in (("local blobs", client), ("S3", remote)):
            one = One(found, **disk)
            one.run(FILL.format(size=size))
            change = partial(one.run, "open('small', 'a').write('more')")
            ways += [
                Way(f"first archive, {name}", partial(one.do, "archive"), ours=True),
                Way(f"start from the archive, {name}", partial(one.do, "start"), ours=True),
                Way(f"archive, little changed, {name}", partial(one.do, "archive"), change, True),
                Way(f"again from the archive, {name}", partial(one.do, "start"), ours=True),
            ]
        report.turns(ways, rounds, size=size << 20)


def pauses(report: Report, rounds: int) -> None:
    report.section("a session that stands still")
    with Server(**FIXED) as server:
        one = One(server.client())
        one.run("kept = 1")
        report.turns(
            [
                Way("execute", one.run),
                Way("pause", partial(one.do, "pause"), ours=True),
                Way("resume", partial(one.do, "resume"), ours=True),
                Way("execute in a paused one", one.run, partial(one.do, "pause"), ours=True),
            ],
            rounds * 5,
            sync=False,
        )


def clones(report: Report, place: Path, size: int, rounds: int) -> None:
    report.section(f"a copy of a session with {size} MiB")
    with Server(**FIXED) as server:
        client = server.client()
        one = One(client, disk=f"{size * 2 + 64}Mi")
        one.run(FILL.format(size=size))
        made: list[str] = []

        def clone() -> None:
            made.append(one.clone())

        def clear() -> None:
            while made:
                delete(client, made.pop())

        source = place / "source"
        with source.open("wb") as file:
            for _ in range(size):
                file.write(os.urandom(1 << 20))
        report.turns(
            [
                Way("cp of the same file", partial(shutil.copyfile, source, place / "copy")),
                Way("clone", clone, clear, ours=True),
            ],
            rounds,
            size=size << 20,
        )
        clear()


def moves(report: Report, place: Path, count: int) -> None:
    """From the kill of the node to when the last of its sessions runs elsewhere."""
    report.section(f"{count} sessions of a node that is killed (probed every 0.3 s, lost after 3)")
    with (
        S3Server(place) as s3,
        Fleet(place, blobs=s3.environment(), ATOLL_WORKSPACE__DELAY="0.1") as fleet,
    ):
        api = fleet[1].api
        found = []
        for number in range(count):
            session = fleet.create_on(fleet[0], timeout=86_000)
            fleet[0].api.run(session, f"open('mine', 'w').write('{number}')")
            found.append(session)
        for session in found:
            eventually(partial(_is_saved, fleet[0].api, session), 60)
        began = time.perf_counter()
        fleet[0].kill()
        left = set(found)
        values = []

        def arrived() -> bool:
            for one in list(left):
                shown = api.get(one)
                if shown["runtime_node"] == fleet[1].id and shown["status"] == "running":
                    values.append((time.perf_counter() - began) * 1000)
                    left.discard(one)
            return not left

        eventually(arrived, 300)
        for number, one in enumerate(found):
            assert api.run(one, "print(open('mine').read(), end='')")["stdout"] == str(number)
            api.end(one)
        name = f"until one of {count} runs elsewhere"
        report.show({name: samples(name, values)}, [name])
        fleet[0].start()


def _is_saved(api: Api, session: str) -> bool:
    return api.http.get(f"/api/v1/sessions/{session}/checkpoint").status_code == 200


def rests(report: Report, count: int, seconds: float) -> None:
    """What the control plane uses of a core while nothing happens, with and without sessions."""
    report.section(f"{count} sessions at rest, watched for {seconds:g} s")
    for number in (0, count):
        server = Server(**FIXED)
        asyncio.run(_fill(server.data_dir / "atoll.db", number))
        with server:
            server.client().call("GET", "/api/v1/sessions?limit=1")
            time.sleep(5)  # What a start does has ended.
            before = processes.cpu_seconds(server.process.pid)
            time.sleep(seconds)
            share = (processes.cpu_seconds(server.process.pid) - before) / seconds
        report.value(f"CPU with {number} sessions", share * 100, "% of a core")


async def _fill(path: Path, count: int) -> None:
    store = SqlStore([f"sqlite:///{path}"], sqlite=SqliteSettings(), database=DatabaseSettings())
    await store.open()
    now = datetime.now(UTC)
    session = Session(
        id="",
        template_id="python",
        status=SessionStatus.STOPPED,
        wanted=Wanted.STOPPED,
        runtime_type="local",
        runtime_node="local",
        resources=Resources(1.0, 512 << 20, 1 << 30, 128),
        timeout=300,
        created_at=now,
        updated_at=now,
        expires_at=now,
        rested_at=now,
        workspace="gone",
        archive_after=86_400,
    )
    for _ in range(count):
        await store.sessions.add(dataclasses.replace(session, id=ids.session_id()))
    await store.close()


def main() -> None:
    given = arguments()
    with (
        Report("lifecycle", given.json) as report,
        tempfile.TemporaryDirectory(prefix="atoll-bench-") as directory,
    ):
        place = Path(directory)
        if "stop" in given.parts:
            stops(report, given.rounds)
        if "archive" in given.parts:
            archives(report, place, given.size, max(1, given.rounds // 5))
        if "pause" in given.parts:
            pauses(report, given.rounds)
        if "clone" in given.parts:
            clones(report, place, given.size, max(1, given.rounds // 5))
        if "move" in given.parts:
            moves(report, place, given.moved)
        if "rest" in given.parts:
            rests(report, given.resting, given.seconds)


if __name__ == "__main__":
    main()
