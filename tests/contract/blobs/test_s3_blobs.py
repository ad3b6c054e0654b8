"""What S3 alone can go through: links, wrong credentials, servers that are dead or silent."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING

import httpx
import pytest

from atoll.blobs.s3 import S3Blobs, connect
from atoll.errors import TemporaryError
from tests.servers import free_port
from tests.servers.s3 import ACCESS_KEY, BUCKET, DOMAIN, SECRET_KEY, S3Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Mapping
    from pathlib import Path

    from atoll.blobs.base import Blobs

pytestmark = pytest.mark.anyio

MINUTE = timedelta(minutes=1)
MEMORY = 160
"""MiB that a process may use more at its peak for an object of twice that; imports are in it."""
STREAMER = """
import asyncio, os, resource, sys
from datetime import timedelta
from pathlib import Path
from atoll.blobs.local import LocalBlobs
from atoll.blobs.s3 import S3Blobs
from atoll.settings import BlobSettings

MiB = 2**20

async def chunks(count):
    for number in range(count):
        yield bytes([number % 256]) * MiB

async def main():
    settings = BlobSettings.model_validate_json(sys.stdin.read())
    blobs = S3Blobs(settings) if settings.url else LocalBlobs(Path(sys.argv[1]))
    await blobs.put("warm/up", b"1")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert await blobs.write("large/object", chunks(320)) == 320 * MiB
    size = 0
    opened = await blobs.open("large/object")
    async for piece in opened.chunks:
        size += len(piece)
    assert size == 320 * MiB
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)

asyncio.run(main())
"""
WRITER = """
import asyncio, sys
from atoll.blobs.s3 import S3Blobs
from atoll.settings import BlobSettings

async def chunks():
    for number in range(40):
        yield b"n" * 2**20
    print("under way", flush=True)
    await asyncio.Event().wait()

settings = BlobSettings.model_validate_json(sys.stdin.readline())
asyncio.run(S3Blobs(settings).write("big/object", chunks()))
"""


def as_json(server: S3Server, prefix: str) -> str:
    keys = f'"access_key_id": "{ACCESS_KEY}", "secret_access_key": "{SECRET_KEY}"'
    return f'{{"url": "s3://{BUCKET}/{prefix}", "endpoint": "{server.endpoint}", {keys}}}'


def run_program(program: str, *arguments: str, given: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kill_in_the_middle(given: str) -> None:
    """Begin to replace `big/object`, and die before it is done."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write(f"{given}\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "under way\n"
        writer.kill()


async def failure(call: Awaitable[object]) -> TemporaryError:
    with pytest.raises(TemporaryError) as caught:
        await call
    assert caught.value.code == "blobs_unavailable"
    # As a log would show it.
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    for secret in (ACCESS_KEY, SECRET_KEY, "Signature=", "Credential="):
        assert secret not in shown
    return caught.value


async def megabytes(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"1" * 2**20


def calls_of(blobs: Blobs) -> list[Awaitable[object]]:
    return [
        blobs.put("a/b", b"1"),
        blobs.create("a/b", b"1"),
        blobs.write("a/b", megabytes(1)),
        blobs.write("a/b", megabytes(20)),
        blobs.get("a/b"),
        blobs.get("a/b", start=1),
        blobs.head("a/b"),
        blobs.open("a/b"),
        blobs.list("a/"),
        blobs.remove("a/b"),
        blobs.remove_all("a/"),
    ]


@pytest.mark.parametrize("blobs", ["s3-encrypted", "s3-virtual-host"], indirect=True)
async def test_every_operation_works_encrypted_and_with_a_host_for_each_bucket(
    blobs: Blobs,
) -> None:
    await blobs.put("a/b", b"0123456789")
    assert await blobs.get("a/b", start=2, end=5) == b"234"
    assert not await blobs.create("a/b", b"another")
    assert await blobs.create("a/c", b"another")
    assert await blobs.write("a/large", megabytes(20)) == 20 * 2**20
    info = await blobs.head("a/large")
    assert info is not None
    assert info.size == 20 * 2**20
    opened = await blobs.open("a/large", start=2**20)
    assert opened is not None
    assert sum([len(piece) async for piece in opened.chunks]) == 19 * 2**20
    assert [info.key for info in await blobs.list("a/", limit=10)] == ["a/b", "a/c", "a/large"]
    await blobs.remove("a/b")
    assert await blobs.get("a/b") is None
    await blobs.remove_all("a/")
    assert await blobs.list("a/", limit=10) == []


async def test_one_link_reads_an_object_and_another_writes_one(s3: S3Server) -> None:
    blobs = S3Blobs(s3.settings(secrets.token_hex(4)))
    await blobs.put("a/b", b"0123456789")
    await blobs.put("a/c", b"another")

    get = await blobs.presign("GET", "a/b", MINUTE)
    put = await blobs.presign("PUT", "a/b", MINUTE)

    assert get is not None
    assert put is not None
    async with httpx.AsyncClient() as anybody:
        assert (await anybody.get(get)).content == b"0123456789"
        part = await anybody.get(get, headers={"Range": "bytes=2-4"})
        assert (part.status_code, part.content) == (206, b"234")
        for refused in (
            anybody.get(get.replace("/a/b?", "/a/c?")),
            anybody.put(get, content=b"x"),
            anybody.get(put),
            anybody.get(get.partition("?")[0]),
        ):
            assert (await refused).status_code == 403
        assert (await anybody.put(put, content=b"written")).status_code == 200
    assert await blobs.get("a/b") == b"written"


async def test_a_link_expires(s3: S3Server) -> None:
    blobs = S3Blobs(s3.settings(secrets.token_hex(4)))
    await blobs.put("a/b", b"1")
    link = await blobs.presign("GET", "a/b", timedelta(seconds=1))
    assert link is not None

    deadline = time.monotonic() + 30
    async with httpx.AsyncClient() as anybody:
        while (await anybody.get(link)).status_code == 200:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        assert (await anybody.get(link)).status_code == 403


async def test_objects_are_encrypted_on_request(s3: S3Server) -> None:
    prefix = secrets.token_hex(4)
    blobs = S3Blobs(s3.settings(prefix, encryption="AES256"))
    plain = S3Blobs(s3.settings(prefix))

    await blobs.put("a/put", b"1")
    await blobs.create("a/create", b"1")
    await blobs.write("a/write", megabytes(10))
    await plain.put("a/plain", b"1")

    async def encryption(key: str) -> str | None:
        link = await blobs.presign("GET", key, MINUTE)
        assert link is not None
        async with httpx.AsyncClient() as anybody:
            headers: Mapping[str, str] = (await anybody.get(link)).headers
            return headers.get("x-amz-server-side-encryption")

    keys = ("a/put", "a/create", "a/write", "a/plain")
    assert [await encryption(key) for key in keys] == ["AES256"] * 3 + [None]


async def test_an_error_about_credentials_does_not_show_them(s3: S3Server) -> None:
    wrong = S3Blobs(s3.settings("x", secret_access_key=f"{SECRET_KEY}-not"))
    unknown = S3Blobs(s3.settings("x", access_key_id=f"{ACCESS_KEY}NOT"))

    for blobs in (wrong, unknown):
        for call in calls_of(blobs):
            error = await failure(call)
            assert "403 Forbidden" in error.message
    assert "SignatureDoesNotMatch" in (await failure(wrong.put("a", b"1"))).message
    assert "InvalidAccessKeyId" in (await failure(unknown.put("a", b"1"))).message


async def test_a_missing_bucket_is_not_reported_as_a_missing_object(s3: S3Server) -> None:
    blobs = S3Blobs(s3.settings(url="s3://not-there"))

    for call in (blobs.get("a/b"), blobs.list("a/"), blobs.remove_all("a/")):
        assert "NoSuchBucket" in (await failure(call)).message


async def test_credentials_never_appear_in_representations_or_errors(s3: S3Server) -> None:
    settings = s3.settings("x")
    store = connect(settings)

    for shown in (repr(settings), str(settings.model_dump()), repr(store), repr(store.config)):
        assert SECRET_KEY not in shown
        assert ACCESS_KEY not in shown


async def test_credentials_come_from_the_environment_when_settings_have_none(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    prefix = secrets.token_hex(4)
    blobs = S3Blobs(s3.settings(prefix, access_key_id=None, secret_access_key=None))

    await blobs.put("a/b", b"1")

    assert await S3Blobs(s3.settings(prefix)).get("a/b") == b"1"


async def test_settings_override_the_environment(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "another")
    monkeypatch.setenv("AWS_ENDPOINT_URL", dead)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", dead)
    blobs = S3Blobs(s3.settings(secrets.token_hex(4)))

    await blobs.put("a/b", b"1")

    assert await blobs.get("a/b") == b"1"
    link = await blobs.presign("GET", "a/b", MINUTE)
    assert link is not None
    assert link.startswith(s3.endpoint)


async def test_the_proxy_of_the_environment_is_used(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", s3.endpoint)
    monkeypatch.setenv("http_proxy", s3.endpoint)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    settings = s3.settings(secrets.token_hex(4), endpoint=f"http://{DOMAIN}", path_style=False)

    await S3Blobs(settings).put("a/b", b"1")


async def test_a_dead_server_is_reported_within_seconds(s3: S3Server) -> None:
    blobs = S3Blobs(s3.settings("x", endpoint=f"http://127.0.0.1:{free_port()}"))

    for call in calls_of(blobs):
        begun = time.monotonic()
        await failure(call)
        assert time.monotonic() - begun < 30


async def test_a_silent_server_is_reported_in_time(tmp_path: Path) -> None:
    with S3Server(tmp_path) as server:
        blobs = S3Blobs(server.settings("x", timeout=timedelta(seconds=1)))
        patient = S3Blobs(server.settings("x"))
        await patient.put("kept/c", b"1")
        server.pause()

        # Far longer than the time-out, and far shorter than the server is suspended.
        async with asyncio.timeout(60):
            for error in await asyncio.gather(*map(failure, calls_of(blobs))):
                assert "no answer" in error.message

        server.resume()
        # Not what they wrote to: a write that was given up may have been done.
        assert await patient.get("kept/c") == b"1"


async def test_objects_survive_a_kill_of_the_server(tmp_path: Path) -> None:
    with S3Server(tmp_path) as server:
        blobs = S3Blobs(server.settings("x"))
        await blobs.put("a/b", b"1" * 5_000_000)

        server.kill()
        await failure(blobs.get("a/b"))
        server.start()

        assert await blobs.get("a/b") == b"1" * 5_000_000


@pytest.mark.parametrize("where", ["local", "s3"])
async def test_memory_does_not_grow_with_an_object(
    s3: S3Server, tmp_path: Path, where: str
) -> None:
    given = as_json(s3, secrets.token_hex(4)) if where == "s3" else "{}"

    used = await asyncio.to_thread(run_program, STREAMER, str(tmp_path), given=given)

    assert int(used) < MEMORY


async def test_a_kill_during_a_write_keeps_the_old_object(s3: S3Server) -> None:
    prefix = secrets.token_hex(4)
    blobs = S3Blobs(s3.settings(prefix))
    await blobs.put("big/object", b"old")

    await asyncio.to_thread(kill_in_the_middle, as_json(s3, prefix))

    assert await blobs.get("big/object") == b"old"
    assert [info.key for info in await blobs.list("big/")] == ["big/object"]
