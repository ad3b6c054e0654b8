"""Blobs without a reference are removed when they are old enough; all others stay."""

from __future__ import annotations

import dataclasses
import secrets
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from atoll import ids
from atoll.blobs.availability import Availability
from atoll.blobs.base import PAGE_SIZE
from atoll.blobs.local import LocalBlobs
from atoll.blobs.s3 import S3Blobs
from atoll.blobs.spool import Spool
from atoll.coordination.leases import Leases
from atoll.coordination.memory import MemoryCoordination
from atoll.errors import BlobsUnavailable
from atoll.model.checkpoint import Checkpoint, CheckpointRef
from atoll.model.execution import ExecutionStatus
from atoll.model.manifest import Manifest
from atoll.model.session import SessionStatus
from atoll.reconcile import orphaned_blobs as orphans
from atoll.reconcile.orphaned_blobs import OWNER, OrphanedBlobSweep
from atoll.service.checkpoints.chunks import data_of, digest, manifest_of
from atoll.service.checkpoints.service import lease_of
from atoll.settings import BlobSettings, Settings
from atoll.stores.sql.store import SqlStore
from atoll.testing import ManualClock
from tests.contract.stores.store_entities import (
    NOW,
    make_execution,
    make_session,
    make_template,
)
from tests.parts import checkpoints_on, replica_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.blobs.base import Blobs
    from tests.servers.s3 import S3Server

pytestmark = pytest.mark.anyio

DAY = timedelta(hours=24)


class Environment:
    def __init__(
        self, store: SqlStore, blobs: Blobs, leases: Leases, clock: ManualClock, cluster: str
    ) -> None:
        self.store = store
        self.blobs = blobs
        self.leases = leases
        self.clock = clock
        self.checkpoints = checkpoints_on(store, blobs, leases, clock, "node_1")
        self.sweep = self.another(cluster)

    def another(self, cluster: str) -> OrphanedBlobSweep:
        return OrphanedBlobSweep(
            replica_on(self.store, self.leases, self.clock, "node_1"),
            self.blobs,
            self.checkpoints,
            cluster=cluster,
            name="shared",
            request_ttl=DAY,
        )

    async def put(self, *keys: str) -> None:
        for key in keys:
            await self.blobs.put(key, key.encode())

    async def session(self, status: SessionStatus = SessionStatus.RUNNING) -> str:
        session = make_session(status=status, instance_id=None)
        await self.store.sessions.add(session)
        return session.id

    async def backup(self, session_id: str, number: int, *contents: bytes) -> CheckpointRef:
        """A backup of objects with these contents; not recorded."""
        for content in contents:
            await self.blobs.put(data_of(session_id) + digest(content), content)
        objects = {digest(content): (len(content), len(content)) for content in contents}
        data = Manifest(session_id, number, "now", 0, 0, (), objects).encoded()
        key = manifest_of(session_id, number, data)
        await self.blobs.put(key, data)
        return CheckpointRef(number, key, self.clock.now(), 0, 0, "node_1", True)

    async def record(self, session_id: str, newest: CheckpointRef, *older: CheckpointRef) -> None:
        row = Checkpoint(
            id=session_id,
            number=newest.number,
            manifest=newest.manifest,
            created_at=newest.created_at,
            files=0,
            size=0,
            node_id="node_1",
            older=older,
        )
        await self.store.checkpoints.add(row)

    async def keys(self) -> set[str]:
        found: set[str] = set()
        for kind in orphans.KINDS:
            after = None
            while page := await self.blobs.list(kind, after=after):
                found |= {info.key for info in page}
                after = page[-1].key
        return found

    async def later(self, by: timedelta = DAY + timedelta(minutes=1)) -> None:
        """Look at all once, so much later."""
        self.clock.time += by.total_seconds()
        await self.run_all()

    async def run_all(self) -> None:
        await self.leases.heartbeat()
        await self.sweep.turn()
        while (self.sweep._kind, self.sweep._after) != (0, None):
            await self.sweep.turn()


@asynccontextmanager
async def made(place: Path, blobs: Blobs) -> AsyncIterator[Environment]:
    given, clock = Settings(data_dir=place), ManualClock()
    clock.time = time.time()  # As the back-end's.
    store = SqlStore(
        [f"sqlite:///{place / 'atoll.db'}"], sqlite=given.sqlite, database=given.database
    )
    coordination = MemoryCoordination("me", given.coordination, timedelta(hours=1), clock)
    leases = Leases(coordination, clock, given.coordination)
    await store.open()
    await coordination.open()
    await leases.start()
    try:
        yield Environment(store, blobs, leases, clock, await store.cluster())
    finally:
        await coordination.close()
        await store.close()


@pytest.fixture(params=["local", "s3"])
async def environment(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Environment]:
    blobs: Blobs = LocalBlobs(tmp_path / "blobs")
    if request.param == "s3":
        server = request.getfixturevalue("s3")
        settings = server.settings(secrets.token_hex(4))
        clock = ManualClock()
        blobs = Spool(
            S3Blobs(settings), tmp_path / "spool", settings, clock, prefixes=("workspaces/",)
        )
    async with made(tmp_path, blobs) as environment:
        yield environment


async def test_unknown_blobs_are_removed_when_they_are_old_enough(environment: Environment) -> None:
    lost, execution = ids.session_id(), ids.execution_id(NOW)
    keys = [
        f"workspaces/{lost}/data/{digest(b'1')}",
        f"workspaces/{lost}/manifests/00000001",
        f"exports/{lost}/{digest(b'2')}",
        f"uploads/{lost}/{digest(b'3')}",
        f"executions/20260101/{execution}/stdout",
        f"requests/{digest(b'4')}/holder",
    ]
    await environment.put(*keys)

    await environment.later(DAY - timedelta(minutes=5))
    assert await environment.keys() == set(keys), "they may be on their way to a record"
    await environment.later(timedelta(hours=2))
    assert await environment.keys() == {keys[-1]}, "an answer is kept for a while itself"
    await environment.later(DAY)
    assert await environment.keys() == set()


async def test_foreign_objects_neither_protect_orphans_nor_make_the_store_unavailable(
    s3: S3Server, tmp_path: Path
) -> None:
    prefix = secrets.token_hex(4)
    settings, clock = s3.settings(prefix), ManualClock()
    remote = S3Blobs(settings)
    blobs = Spool(remote, tmp_path / "spool", settings, clock, prefixes=("workspaces/",))
    for key in ("workspaces/line\nbreak/x", "exports/with space/x", "exports/zz#", "requests/ü/x",
                f"requests/{'n' * 250}/{'n' * 250}/{'n' * 250}"):  # fmt: skip
        s3.plant(f"{prefix}/{key}", b"not ours")
    async with made(tmp_path, blobs) as environment:
        lost = ids.session_id()
        keys = [f"exports/{lost}/a", f"uploads/{lost}/b", f"requests/{digest(b'1')}/holder"]
        await environment.put(*keys)
        assert [info.key for info in await blobs.list("exports/", limit=1)] == keys[:1]
        with capture_logs() as logs:
            await environment.later(3 * DAY)
        assert [await blobs.head(key) for key in keys] == [None] * 3
        assert [line["kind"] for line in logs if line["event"] == "orphan_sweep.not_listed"] == [
            "workspaces/"
        ]
        # Another program's object at the key that identifies the owner of the store.
        s3.plant(f"{prefix}/{OWNER}", b"x" * 10_000)
        await environment.put(keys[0])
        await environment.later(3 * DAY)
        assert await blobs.head(keys[0]) is not None
    assert await Availability(remote, "workspaces/", settings, clock).probe()


async def test_blobs_of_kept_backups_stay_and_others_are_removed(environment: Environment) -> None:
    session = await environment.session()
    dropped = await environment.backup(session, 1, b"shared", b"only in the first")
    older = await environment.backup(session, 2, b"shared", b"only in the second")
    newest = await environment.backup(session, 3, b"shared", b"only in the third")
    await environment.record(session, newest, older)
    # Of a save that was broken off, with and without its manifest.
    broken = await environment.backup(session, 4, b"shared", b"only in the fourth")
    stray = data_of(session) + digest(b"stray")
    await environment.put(stray, f"exports/{session}/file", f"uploads/{session}/file")
    before = await environment.keys()

    await environment.later()

    gone = {stray, dropped.manifest, broken.manifest}
    gone |= {data_of(session) + digest(b"only in the " + name) for name in (b"first", b"fourth")}
    assert before - await environment.keys() == gone


async def test_no_blob_is_removed_while_a_manifest_cannot_be_read(environment: Environment) -> None:
    session = await environment.session()
    newest = await environment.backup(session, 2, b"needed")
    await environment.record(
        session,
        newest,
        CheckpointRef(1, "workspaces/x/y", environment.clock.now(), 0, 0, "n", True),
    )
    await environment.put(data_of(session) + digest(b"stray"))
    before = await environment.keys()

    await environment.later()

    assert await environment.keys() == before


async def test_no_blob_of_a_session_is_removed_while_it_is_saved(environment: Environment) -> None:
    session = await environment.session()
    stray = data_of(session) + digest(b"stray")
    await environment.put(stray)
    environment.clock.time += 2 * DAY.total_seconds()
    await environment.leases.heartbeat()
    async with environment.leases.lease(lease_of(session), "another's save"):
        await environment.run_all()
        assert await environment.keys() == {stray}
    await environment.later(timedelta(hours=2))
    assert await environment.keys() == set()


async def test_blobs_written_after_a_session_was_deleted_are_removed(
    environment: Environment,
) -> None:
    over, kept = [await environment.session(SessionStatus.TERMINATED) for _ in range(2)]
    newest = await environment.backup(kept, 1, b"needed")
    await environment.record(kept, newest)
    await environment.put(f"uploads/{over}/late", f"exports/{kept}/file")
    before = await environment.keys()

    await environment.later()

    assert before - await environment.keys() == {f"uploads/{over}/late"}


async def test_parts_of_executions_stay_while_a_record_refers_to_them(
    environment: Environment,
) -> None:
    parts = {}
    for status in (ExecutionStatus.COMPLETED, ExecutionStatus.RUNNING):
        execution = make_execution(status=status)
        prefix = f"executions/20260101/{execution.id}/"
        await environment.store.executions.add(
            dataclasses.replace(execution, kept={"stdout": f"{prefix}stdout-1"})
        )
        parts[status] = {f"{prefix}stdout-1", f"{prefix}stdout-2"}
        await environment.put(*parts[status])

    await environment.later()

    left = await environment.keys()
    assert left & parts[ExecutionStatus.RUNNING] == parts[ExecutionStatus.RUNNING]
    assert {key[-1] for key in left & parts[ExecutionStatus.COMPLETED]} == {"1"}


async def test_blobs_of_another_database_are_not_removed(environment: Environment) -> None:
    await environment.blobs.put(OWNER, b"another")
    key = f"workspaces/{ids.session_id()}/data/{digest(b'1')}"
    await environment.put(key)

    await environment.later()

    assert await environment.keys() == {key}


async def test_a_turn_checks_a_few_pages_and_the_next_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = LocalBlobs(tmp_path / "blobs")
    async with made(tmp_path, blobs) as environment:
        count = orphans.PAGES * PAGE_SIZE + 10
        folder = tmp_path / "blobs" / "workspaces"
        for _ in range(count // 10):
            directory = folder / ids.session_id() / "data"
            directory.mkdir(parents=True)
            for number in range(10):
                (directory / digest(b"%d" % number)).touch()
        environment.clock.time += 2 * DAY.total_seconds()
        await environment.leases.heartbeat()

        await environment.sweep.turn()
        assert sum(1 for path in folder.rglob("*") if path.is_file()) == count - 4 * PAGE_SIZE
        await environment.sweep.turn()
        assert await environment.keys() == set()
        # All pages were checked: there is a pause now.
        await environment.put(f"workspaces/{ids.session_id()}/data/x")
        monkeypatch.setattr(orphans, "GRACE", timedelta(0))
        await environment.sweep.turn()
        assert len(await environment.keys()) == 1
        environment.clock.time += orphans.ROUND
        await environment.leases.heartbeat()
        await environment.sweep.turn()
        assert await environment.keys() == set()


class Away(LocalBlobs):
    away = False

    async def put(self, key: str, data: bytes) -> None:
        if self.away:
            raise BlobsUnavailable("The test says no.")
        await super().put(key, data)


async def test_spooled_blobs_are_not_orphans(tmp_path: Path) -> None:
    remote, clock = Away(tmp_path / "remote"), ManualClock()
    spool = Spool(remote, tmp_path / "spool", BlobSettings(), clock, prefixes=("workspaces/",))
    async with made(tmp_path, spool) as environment:
        session = await environment.session()
        waits, stored = (data_of(session) + digest(name) for name in (b"1", b"2"))
        await environment.put(stored)
        remote.away = True
        await environment.put(waits)
        remote.away = False
        clock.time += 60
        await environment.later()
        assert await environment.keys() == {waits, stored}

        assert await spool.catch_up()
        await environment.later()
        assert await environment.keys() == set()


async def test_a_build_context_stays_while_a_template_version_refers_to_it(
    environment: Environment,
) -> None:
    first, second, lost = (digest(text) for text in (b"1", b"2", b"3"))
    await environment.put(*(f"build-contexts/{name}" for name in (first, second, lost)))
    template = make_template(dockerfile="FROM a", build_context=first)
    await environment.store.templates.add(template)
    newer = dataclasses.replace(template, build_context=second)
    newer = await environment.store.templates.supersede(template, newer)

    await environment.later(DAY + timedelta(hours=1))
    assert await environment.keys() == {f"build-contexts/{name}" for name in (first, second)}
    await environment.store.templates.drop(template.id, template.number)
    await environment.later(timedelta(hours=2))
    assert await environment.keys() == {f"build-contexts/{second}"}
