"""S3 is killed and recovers: no accepted data is lost, and no request waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from atoll.app.embedded import embedded
from atoll.blobs.base import MAX_GET, PART_SIZE
from atoll.blobs.s3 import S3Blobs
from atoll.blobs.spool import Spool
from atoll.clock import SystemClock
from atoll.errors import TemporaryError
from tests.e2e.api import V1, Api, answer, eventually
from tests.harness import Server
from tests.servers.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

LARGE = "print('o' * 99_999)\n#" + "c" * 40_000
# Every place where code inside could find what the server was given.
SEARCH = f"""
import os, subprocess
secrets = [{ACCESS_KEY!r}[::-1][::-1], "".join(reversed({SECRET_KEY[::-1]!r}))]
seen = dict(os.environ)
seen["shell"] = subprocess.run(["env"], capture_output=True, text=True).stdout
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try:
            seen[pid + name] = open(f"/proc/{{pid}}/{{name}}", "rb").read().decode(errors="replace")
        except OSError:
            pass
found = [name for name, text in seen.items() if any(secret in text for secret in secrets)]
names = [name for name in seen if name.startswith(("ATOLL_BLOB", "AWS_"))]
def handler(event):
    return [found, names, len(seen)]
"""


@pytest.fixture
def restarted_s3(tmp_path: Path) -> Iterator[S3Server]:
    """Not that of other tests: it is killed."""
    directory = tmp_path / "s3"
    directory.mkdir()
    with S3Server(directory) as running:
        yield running


def keys_in(server: S3Server, prefix: str) -> list[str]:
    return [item["path"] for page in server.store().list(prefix) for item in page]


def spooled(data_dir: Path) -> list[str]:
    # Not with rglob, which fails when a directory is removed concurrently.
    return [name for _, _, names in os.walk(data_dir / "spool" / "objects") for name in names]


def metrics_of(server: Server) -> dict[str, float]:
    with server.client() as http:
        lines = http.get("/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def check_log(server: Server) -> None:
    """The log of the server must not contain its credentials."""
    assert SECRET_KEY not in server.stderr()
    assert ACCESS_KEY not in server.stderr()


@pytest.mark.anyio
async def test_blobs_put_while_the_server_is_killed_reach_the_bucket_later(
    restarted_s3: S3Server, tmp_path: Path
) -> None:
    settings = restarted_s3.settings("x", retry_after="0.2")
    blobs = Spool(
        S3Blobs(settings), tmp_path / "spool", settings, SystemClock(), prefixes=("workspaces/",)
    )
    stopped = asyncio.Event()
    put: dict[str, bytes] = {}
    most = 0

    async def work(worker: int) -> None:
        number = 0
        while not stopped.is_set():
            if len(put) >= most:
                # The spool stays small, however long the outage takes.
                await asyncio.sleep(0.01)
                continue
            number += 1
            key = f"workspaces/s/data/{worker}-{number:05}"
            data = key.encode() * 1000
            if number % 10 == 0:
                assert await blobs.write(key, large(data)) == PART_SIZE + len(data)
                data = b"1" * PART_SIZE + data
            else:
                await blobs.put(key, data)
            put[key] = data
            # Objects in the bucket cannot be read while it is unavailable.
            with suppress(TemporaryError):
                assert await blobs.get(key) == data
            manifest = f"workspaces/s/manifests/{worker}-{number:05}"
            await blobs.put(manifest, key.encode())
            put[manifest] = key.encode()
            await asyncio.sleep(0.01)

    async def large(data: bytes) -> AsyncIterator[bytes]:
        yield b"1" * PART_SIZE
        yield data

    loop = asyncio.create_task(blobs.run())
    try:
        async with asyncio.TaskGroup() as group:
            for worker in range(3):
                group.create_task(work(worker))
            for _ in range(2):
                most = len(put) + 60
                while len(put) < most - 30:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(restarted_s3.kill)
                most = len(put) + 60
                while len(put) < most - 30 or blobs.away is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert blobs.usage.objects > 0
                await asyncio.to_thread(restarted_s3.start)
                while blobs.away is not None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            stopped.set()

        async with asyncio.timeout(120):
            while blobs.usage.objects:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop
    there = S3Blobs(settings)
    for key, data in put.items():
        assert await there.get(key) == data, key
    assert spooled(tmp_path) == []


def test_executions_continue_while_s3_is_unavailable(
    bubblewrap: str, restarted_s3: S3Server, tmp_path: Path
) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    with Server(data_dir, **restarted_s3.environment()) as server:
        with server.client() as http:
            api = Api(http)
            session = api.create()["id"]
            before = api.run(session, LARGE)
            assert keys_in(restarted_s3, "atoll/executions")
            assert not (data_dir / "blobs").exists()
            assert metrics_of(server)["atoll_blobs_away"] == 0

            restarted_s3.kill()
            begun = time.monotonic()
            results = [api.run(session, LARGE, execution_id=f"away-{n}") for n in range(5)]
            assert time.monotonic() - begun < 20

            assert [result["stdout"] for result in results] == ["o" * 99_999 + "\n"] * 5
            assert [result["shortened"] for result in results] == [[]] * 5
            assert api.result("away-3") == results[3]
            assert http.get("/ready").status_code == http.get("/health").status_code == 200
            assert len(spooled(data_dir)) >= 10
            found = metrics_of(server)
            assert found["atoll_blobs_away"] == 1
            assert found["atoll_spool_objects"] >= 10
            assert found["atoll_spool_bytes"] >= 5 * 140_000
            old = http.get(f"{V1}/executions/{before['execution_id']}/result")
            assert (old.status_code, old.json()["code"]) == (503, "blobs_unavailable")
            assert int(old.headers["Retry-After"]) >= 1

        # What waits outlives the server too, and is read by the next.
        server.stop(signal.SIGKILL)
        server.start()
        with server.client() as http:
            assert Api(http).result("away-3") == results[3]

            restarted_s3.start()
            eventually(lambda: not spooled(data_dir), 60)
            eventually(lambda: metrics_of(server)["atoll_spool_objects"] == 0, 60)
            assert sum("away-" in key for key in keys_in(restarted_s3, "atoll/executions")) >= 10
            assert [Api(http).result(f"away-{n}") for n in range(5)] == results
            assert Api(http).result(before["execution_id"]) == before
        check_log(server)
        assert "blobs.away" in server.stderr()


def test_results_that_do_not_fit_in_the_spool_wait_for_space(
    bubblewrap: str, restarted_s3: S3Server, tmp_path: Path
) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    small = restarted_s3.environment(ATOLL_BLOB__SPOOL_SIZE=str(2**20))
    with Server(data_dir, **small) as server, server.client() as http:
        api = Api(http)
        session = api.create(capacity=4)["id"]
        restarted_s3.kill()
        ids = [api.submit(session, "print('o' * 149_999)") for _ in range(10)]
        large = "#" + "c" * 200_000
        eventually(lambda: api.execute(session, code=large).json().get("code") == "spool_full")
        assert any(api.status(one) != "completed" for one in ids)

        restarted_s3.start()

        results = [api.result(one) for one in ids]
        assert {result["stdout"] for result in results} == {"o" * 149_999 + "\n"}
        assert {result["status"] for result in results} == {"success"}
        eventually(lambda: not spooled(data_dir), 60)
        check_log(server)


@pytest.mark.anyio
async def test_an_embedded_atoll_uploads_its_spool_when_it_closes(
    bubblewrap: str, restarted_s3: S3Server, tmp_path: Path
) -> None:
    settings = restarted_s3.settings("embedded", retry_after="3600")
    async with embedded(data_dir=tmp_path / "data", blob=settings) as web:
        transport = httpx.ASGITransport(web)
        async with httpx.AsyncClient(transport=transport, base_url="http://atoll") as http:
            session = (await http.post(f"{V1}/sessions", json={})).json()["id"]
            await asyncio.to_thread(restarted_s3.kill)
            given = {"code": LARGE, "wait": 20}
            result = await http.post(f"{V1}/sessions/{session}/execute", json=given)
            assert result.json()["stdout"] == "o" * 99_999 + "\n"
            await asyncio.to_thread(restarted_s3.start)

    assert len(keys_in(restarted_s3, "embedded/executions")) >= 2


def test_a_server_starts_and_warns_while_s3_is_unavailable(
    bubblewrap: str, restarted_s3: S3Server, tmp_path: Path
) -> None:
    restarted_s3.kill()
    with Server(tmp_path, **restarted_s3.environment()) as server:
        with server.client() as http:
            assert Api(http).run(Api(http).create()["id"], LARGE)["status"] == "success"
        assert "blobs.away" in server.stderr()
        restarted_s3.start()
        eventually(lambda: not spooled(tmp_path), 60)
        check_log(server)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"ATOLL_BLOB__SECRET_ACCESS_KEY": f"{SECRET_KEY}-not"}, "403 Forbidden"),
        ({"ATOLL_BLOB__URL": "s3://no-such-bucket"}, "NoSuchBucket"),
    ],
    ids=["credentials", "bucket"],
)
def test_an_s3_problem_is_logged_at_the_start(
    bubblewrap: str, s3: S3Server, tmp_path: Path, wrong: dict[str, str], told: str
) -> None:
    with Server(tmp_path, **s3.environment(**wrong)) as server:
        eventually(lambda: told in server.stderr(), 60)
        check_log(server)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ATOLL_BLOB__URL": f"s3://{ACCESS_KEY}:{SECRET_KEY}@{BUCKET}"},
        {"ATOLL_BLOB__ENDPOINT": f"https://{ACCESS_KEY}:{SECRET_KEY}@s3.example.com"},
        {"ATOLL_BLOB__ENCRYPTION": "rot13"},
        {"ATOLL_BLOB__KMS_KEY_ID": "key-1"},
    ],
    ids=["url", "endpoint", "encryption", "key"],
)
def test_an_invalid_setting_ends_the_start_without_showing_secrets(
    s3: S3Server, tmp_path: Path, wrong: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "atoll.cli", "serve", "--port", "0", "--data-dir", str(tmp_path)],
        env={**os.environ, **s3.environment(**wrong)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode != 0
    shown = done.stdout + done.stderr
    assert "blob" in shown
    assert "Traceback" not in shown
    assert SECRET_KEY not in shown
    assert ACCESS_KEY not in shown


def test_credentials_reach_neither_code_nor_responses(
    bubblewrap: str, s3: S3Server, tmp_path: Path
) -> None:
    aws = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    with Server(tmp_path, **s3.environment(**aws, ATOLL_LOG_LEVEL="debug")) as server:
        with server.client() as http:
            api = Api(http)
            session = api.create()["id"]
            result = api.run(session, SEARCH)
            found, names, looked = result["return_value"]
            assert (found, names) == ([], [])
            assert looked > 5
            answers: list[Any] = [
                result["stdout"],
                answer(http.get(f"{V1}/sessions/{session}")),
                http.get("/metrics").text,
                http.get("/openapi.json").text,
            ]
            assert SECRET_KEY not in json.dumps(answers)
        check_log(server)
        status = subprocess.run(
            [sys.executable, "-m", "atoll.cli", "doctor", "--data-dir", str(tmp_path)],
            env={**os.environ, **s3.environment()},
            capture_output=True,
            text=True,
            check=False,
        )
        assert SECRET_KEY not in status.stdout + status.stderr


class CountingBlobs(S3Blobs):
    """Counts reads of objects."""

    count = 0

    async def get(
        self, key: str, *, start: int = 0, end: int | None = None, limit: int = MAX_GET
    ) -> bytes | None:
        self.count += 1
        return await super().get(key, start=start, end=end, limit=limit)


@pytest.mark.anyio
async def test_calls_fail_at_once_while_s3_is_down(restarted_s3: S3Server, tmp_path: Path) -> None:
    settings = restarted_s3.settings("x", retry_after="3600")
    remote = CountingBlobs(settings)
    blobs = Spool(remote, tmp_path / "spool", settings, SystemClock(), prefixes=("workspaces/",))
    await blobs.put("workspaces/1", b"1")
    await asyncio.to_thread(restarted_s3.kill)
    with pytest.raises(TemporaryError):
        await blobs.get("workspaces/1")

    for _ in range(100):
        with pytest.raises(TemporaryError, match="unavailable"):
            await blobs.get("workspaces/1")
    assert remote.count == 1
