"""The spawner's client, with a real spawner that starts shells instead of sandboxes."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from atoll.drivers.local.spawner_client import DataDirectory, SpawnerClient, SpawnRequest
from atoll.drivers.shared import bounded_log
from atoll.errors import TemporaryError
from tests.contract.drivers.test_driver_contract import until
from tests.host_processes import below, living
from tests.standstill import go_on, stand_still

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio

DATA_DIRECTORY = DataDirectory("/", [], 3600, "test")
# Like bubblewrap, it reports the pid of its child.
SCRIPT = 'sleep 600 & echo "{\\"child-pid\\": $!}" >&5; exec 5>&-; wait'


def request(place: Path, name: str, padding: int = 0) -> SpawnRequest:
    directory = place / name
    directory.mkdir()
    return SpawnRequest(
        instance=name,
        argv=["/bin/sh", "-c", SCRIPT, "x" * padding],
        directory=str(directory),
        groups=[],
        rlimits={},
        binds=[],
        ephemeral=True,
    )


@pytest.fixture
async def client() -> AsyncIterator[SpawnerClient]:
    made = SpawnerClient(timedelta(seconds=20), DATA_DIRECTORY)
    yield made
    pids = below(made._process.pid) if made._process else set()
    await made.close()
    for pid in pids & living():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def test_many_concurrent_starts_all_succeed(client: SpawnerClient, tmp_path: Path) -> None:
    """More than the socket holds, so that senders have to wait for room."""
    requests = [request(tmp_path, f"i{number}", padding=100_000) for number in range(24)]
    pids = await asyncio.gather(*(client.spawn(one) for one in requests))
    assert len({pid for pair in pids for pid in pair}) == 48


async def test_a_spawner_that_does_not_answer_is_a_temporary_error(tmp_path: Path) -> None:
    client = SpawnerClient(timedelta(seconds=0.5), DATA_DIRECTORY)
    client.open()
    assert client._process is not None
    spawner = client._process.pid

    async def has_ended() -> bool:
        return bool(client.exits) and not below(spawner) & living()

    try:
        try:
            stand_still(spawner)
            with pytest.raises(TemporaryError) as caught:
                await client.spawn(request(tmp_path, "late"))
            assert caught.value.code == "instance_not_started"
        finally:
            go_on(spawner)
        # It is started nevertheless, reported and ended: otherwise it would be unknown.
        await until(has_ended, "its end", 60)
    finally:
        await client.close()


async def test_an_ephemeral_instance_ends_with_its_owner_even_during_its_start(
    client: SpawnerClient, tmp_path: Path
) -> None:
    """Bubblewrap has started it, but has neither reported it nor bound its life to its own."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    wanted = request(tmp_path, "late")
    script = 'sleep 600 & read word <"$0"; echo "{\\"child-pid\\": $!}" >&5; exec 5>&-; wait'
    wanted = replace(wanted, argv=["/bin/sh", "-c", script, str(gate)])
    starting = asyncio.create_task(client.spawn(wanted))
    started: set[int] = set()

    async def both_are_started() -> bool:
        started.update(below(client._process.pid) if client._process else ())
        return len(started) == 2

    async def has_ended() -> bool:
        return not started & living()

    await until(both_are_started, "the shell and its child")
    closing = asyncio.create_task(client.close())
    with pytest.raises(TemporaryError, match="the spawner ended"):
        await starting
    await asyncio.to_thread(gate.write_text, "go on\n")
    await closing
    await until(has_ended, "their end")


async def test_output_of_a_program_is_limited_and_explains_its_exit(
    client: SpawnerClient, tmp_path: Path
) -> None:
    """However much it is: no file of the host grows, and nothing of the size is read."""
    script = 'echo "{\\"child-pid\\": $$}" >&5; exec 5>&-; yes flood | head -c 50000000 >&2; exit 3'
    flood = replace(request(tmp_path, "flood"), argv=["/bin/sh", "-c", script])
    pid, _ = await client.spawn(flood)

    async def has_ended() -> bool:
        return pid in client.exits

    await until(has_ended, "its end")
    status, printed = client.exits[pid]
    assert os.waitstatus_to_exitcode(status) == 3
    assert printed.endswith("flood\nfloo")
    assert len(printed) <= bounded_log.LOG_TAIL
    assert [path.name for path in (tmp_path / "flood").iterdir()] == ["link.sock"]


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed before"])
async def test_a_spawner_that_has_ended_leaves_no_zombie_after_close(killed: bool) -> None:
    client = SpawnerClient(timedelta(seconds=20), DATA_DIRECTORY)
    client.open()
    assert client._process is not None
    pid = client._process.pid
    if killed:
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(client._closed.wait(), 60)
    for _ in range(2):
        await client.close()
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 - it does not wait


async def test_close_does_not_wait_for_a_spawner_that_stays_with_an_instance(
    client: SpawnerClient, tmp_path: Path
) -> None:
    lasting = replace(request(tmp_path, "lasting"), ephemeral=False)
    pair = await client.spawn(lasting)
    assert client._process is not None
    spawner = client._process.pid
    await asyncio.wait_for(client.close(), 60)
    assert {spawner, *pair} <= living()
    for pid in pair:
        os.kill(pid, signal.SIGKILL)

    async def has_ended() -> bool:
        return not {spawner, *pair} & living()

    await until(has_ended, "the spawner's end", 60)
