"""
A server is killed at any point of a save: what was saved last is whole, and nothing is left over.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from atoll.blobs.local import LocalBlobs
from atoll.blobs.s3 import S3Blobs
from atoll.coordination.leases import Leases
from atoll.coordination.memory import MemoryCoordination
from atoll.reconcile.orphaned_blobs import OrphanedBlobSweep
from atoll.service.checkpoints.chunks import data_of
from atoll.settings import Settings
from atoll.stores.sql.store import SqlStore
from atoll.testing import ManualClock
from tests.e2e.api import V1, Api, answer
from tests.harness import Server
from tests.parts import checkpoints_on, replica_on

if TYPE_CHECKING:
    from atoll.blobs.base import Blobs
    from tests.servers.s3 import S3Server

pytestmark = pytest.mark.anyio

ROUNDS = 6
FILES = 30
WRITE = f"""
import random
source = random.Random(GENERATION)
for number in range({FILES}):
    with open(f"{{number}}", "wb") as file:
        file.write(b"GENERATION\\n" + source.randbytes(300_000))
"""
READ = f"""
import json, random
found = []
for number in range({FILES}):
    generation, content = open(f"{{number}}", "rb").read().split(b"\\n", 1)
    found.append(int(generation))
    source = random.Random(found[-1]) if number == 0 else source
    assert content == source.randbytes(300_000), number
print(json.dumps(sorted(set(found))))
"""


def lose_workspace(server: Server, session: dict[str, Any]) -> None:
    """As a node does whose disk is gone."""
    instance = session["container_id"]
    handle = server.data_dir / "node" / "instances" / instance / "handle.json"
    data = json.loads(handle.read_text())["data"]
    os.kill(data["child"], signal.SIGKILL)
    for each in (server.data_dir / "node" / "workspaces").glob(f"{data['workspace']}*"):
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def saved(api: Api, session_id: str) -> dict[str, Any]:
    return answer(api.http.get(f"{V1}/sessions/{session_id}/checkpoint"))


def save(server: Server, session_id: str, began: threading.Event) -> None:
    with suppress(httpx.HTTPError), server.client() as http:
        began.set()
        http.post(f"{V1}/sessions/{session_id}/checkpoint")


@pytest.mark.parametrize("where", ["local", "s3"])
async def test_the_last_checkpoint_survives_a_kill_during_the_next_one(
    bubblewrap: str, tmp_path: Path, request: pytest.FixtureRequest, where: str
) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    s3: S3Server | None = request.getfixturevalue("own_s3") if where == "s3" else None
    # Automatic saves would interfere.
    quiet = {"ATOLL_POOL__SIZE": "0", "ATOLL_WORKSPACE__DELAY": "3600"}
    environment = quiet if s3 is None else s3.environment(**quiet)
    chance = random.Random(7)
    generations: dict[int, int] = {}
    """By number of the save."""
    with Server(directory, **environment) as server:
        with server.client() as http:
            api = Api(http)
            session = str(api.create()["id"])
            api.run(session, WRITE.replace("GENERATION", "0"))
            began = time.monotonic()
            generations[answer(http.post(f"{V1}/sessions/{session}/checkpoint"))["number"]] = 0
            takes = time.monotonic() - began
        for round_ in range(1, ROUNDS + 1):
            with server.client() as http:
                Api(http).run(session, WRITE.replace("GENERATION", str(round_)))
                generations[saved(Api(http), session)["number"] + 1] = round_
            asked = threading.Event()
            saving = threading.Thread(target=save, args=(server, session, asked))
            saving.start()
            asked.wait()
            saving.join(chance.uniform(0, 1.2) * takes)
            server.stop(signal.SIGKILL)
            saving.join()
            server.start()
            with server.client() as http:
                api = Api(http)
                lose_workspace(server, api.get(session))
                last = saved(api, session)["number"]
                assert api.run(session, READ)["stdout"] == f"{[generations[last]]}\n"
        server.stop(signal.SIGKILL)
        await collect(directory, session, None if s3 is None else S3Blobs(s3.settings("atoll")))
        server.start()
        with server.client() as http:
            api = Api(http)
            lose_workspace(server, api.get(session))
            assert api.run(session, READ)["stdout"] == f"{[generations[last]]}\n"
            codes = {warning["code"] for warning in api.get(session)["warnings"]}
            assert "older_backup" not in codes


async def collect(place: Path, session_id: str, remote: Blobs | None) -> None:
    """Sweep two days later: nothing but what the record needs is left then."""
    blobs = remote or LocalBlobs(place / "blobs")
    given, clock = Settings(data_dir=place), ManualClock()
    store = SqlStore(
        [f"sqlite:///{place / 'atoll.db'}"], sqlite=given.sqlite, database=given.database
    )
    coordination = MemoryCoordination("me", given.coordination, timedelta(hours=1), clock)
    leases = Leases(coordination, clock, given.coordination)
    await store.open()
    await coordination.open()
    try:
        clock.time = time.time() + timedelta(days=2).total_seconds()
        await leases.start()
        checkpoints = checkpoints_on(store, blobs, leases, clock, "node")
        sweep = OrphanedBlobSweep(
            replica_on(store, leases, clock, "node"),
            blobs,
            checkpoints,
            cluster=await store.cluster(),
            name="shared",
            request_ttl=timedelta(days=1),
        )
        for _ in range(3):
            await sweep.once()
        checkpoint = await checkpoints.verify(session_id)
        needed = {data_of(session_id) + name for name in await checkpoints.objects_of(checkpoint)}
        needed |= {one.manifest for one in checkpoint.backups}
        assert {info.key for info in await blobs.list(f"workspaces/{session_id}/")} == needed
    finally:
        await coordination.close()
        await store.close()
