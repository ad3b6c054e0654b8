"""Uploads and downloads: sources, progress and lost connections."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from atoll import Atoll, Conflict, InvalidRequest, PermanentError, RequestError, TemporaryError
from atoll.sdk.retry import Backoff
from atoll.sdk.values import FileEvent
from tests.component.sdk.fake_server import KEY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from atoll import AsyncAtoll
    from tests.component.sdk.fake_server import FakeServer

pytestmark = pytest.mark.anyio

DATA = bytes(range(256)) * 4096


class Progress(list[tuple[int, int | None]]):
    def __call__(self, size: int, total: int | None) -> None:
        self.append((size, total))

    def check(self, size: int, total: int | None) -> None:
        assert self[-1] == (size, total)
        assert [size for size, _ in self] == sorted({size for size, _ in self})


def pieces(data: bytes) -> Iterator[bytes]:
    yield b""
    for start in range(0, len(data), 100_000):
        yield data[start : start + 100_000]


async def later(data: bytes) -> AsyncIterator[bytes]:
    for piece in pieces(data):
        await asyncio.sleep(0)
        yield piece


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


class Stubborn(io.RawIOBase):
    """A file that takes only some of what it is given, as a pipe may."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: Any) -> int:
        self.data += bytes(data[:1000])
        return min(len(data), 1000)


def test_an_upload_reads_paths_files_bytes_and_iterators(
    atoll: Atoll, fake_server: FakeServer, tmp_path: Path
) -> None:
    local = tmp_path / "a.bin"
    local.write_bytes(DATA)
    with atoll.session() as session, local.open("rb") as file:
        file.seek(10)
        sources: list[tuple[Any, bytes, int | None]] = [
            (local, DATA, len(DATA)),
            (str(local), DATA, len(DATA)),
            (file, DATA[10:], len(DATA) - 10),
            (io.BytesIO(DATA), DATA, len(DATA)),
            (DATA, DATA, len(DATA)),
            (pieces(DATA), DATA, None),
            (later(DATA), DATA, None),
            (b"", b"", 0),
        ]
        for source, content, total in sources:
            progress = Progress()
            assert session.files.upload(source, "x", progress=progress).size == len(content)
            assert fake_server.files["x"] == content
            progress.check(len(content), total)
        assert not file.closed


async def test_an_upload_reads_a_pipe(async_atoll: AsyncAtoll, fake_server: FakeServer) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as source, os.fdopen(writing, "wb") as sink:
        sink.write(b"through a pipe")
        sink.close()
        async with async_atoll.session() as session:
            await session.files.upload(source, "x")
    assert fake_server.files["x"] == b"through a pipe"


@pytest.mark.parametrize(
    "source", [io.StringIO("text"), ["text"], [1]], ids=["text file", "text", "number"]
)
def test_a_source_without_bytes_is_refused(
    atoll: Atoll, fake_server: FakeServer, source: Any
) -> None:
    with atoll.session() as session, pytest.raises(InvalidRequest, match="not bytes"):
        session.files.upload(source, "x")
    assert "x" not in fake_server.files


def test_a_source_without_a_name_needs_a_path(atoll: Atoll) -> None:
    with atoll.session() as session, pytest.raises(InvalidRequest, match="path"):
        session.files.upload(io.BytesIO(b"x"))


@pytest.mark.parametrize("embedded", [False, True])
def test_an_error_of_the_source_propagates(
    fake_server: FakeServer, bubblewrap: str, tmp_path: Path, embedded: bool
) -> None:
    def failing() -> Iterator[bytes]:
        yield b"some"
        raise ZeroDivisionError

    def refuse(size: int, total: int | None) -> None:
        raise LookupError

    embedding = Atoll(data_dir=tmp_path, pool={"size": 0})
    client = embedding if embedded else Atoll(fake_server.url, api_key=KEY)
    with client, client.session() as session:
        with pytest.raises(ZeroDivisionError):
            session.files.upload(failing(), "x")
        with pytest.raises(LookupError):
            session.files.upload(b"some", "y", progress=refuse)
        with pytest.raises(FileNotFoundError):
            session.files.upload(tmp_path / "none", "z")


async def test_an_upload_whose_source_never_ends_can_be_cancelled(async_atoll: AsyncAtoll) -> None:
    reading, writing = os.pipe()
    begun, reported = asyncio.Event(), Progress()

    def progress(size: int, total: int | None) -> None:
        reported(size, total)
        begun.set()

    with os.fdopen(reading, "rb", 0) as source, os.fdopen(writing, "wb", 0) as sink:
        sink.write(b"some")
        async with async_atoll.session() as session:
            task = asyncio.create_task(session.files.upload(source, "x", progress=progress))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        sink.write(b"let the reader go")
    assert reported == [(4, None)]


def test_a_download_into_an_open_file_reports_progress(
    atoll: Atoll, fake_server: FakeServer
) -> None:
    fake_server.files["x"], fake_server.etags = DATA, True
    target, stubborn, progress = io.BytesIO(), Stubborn(), Progress()
    with atoll.session() as session:
        session.files.download("x", target, progress=progress)
        session.files.download("x", stubborn)  # type: ignore[call-overload]
        assert b"".join(session.files.stream("x")) == DATA
    assert target.getvalue() == stubborn.data == DATA
    assert not target.closed
    progress.check(len(DATA), len(DATA))


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, None, DATA),
        (5, None, DATA[5:]),
        (5, 9, DATA[5:9]),
        (-7, None, DATA[-7:]),
        (5, 10**9, DATA[5:]),
        (10**9, None, b""),
    ],
)
def test_a_part_of_a_file_is_read(
    atoll: Atoll, fake_server: FakeServer, start: int, stop: int | None, expected: bytes
) -> None:
    fake_server.files["x"], fake_server.etags = DATA, True
    with atoll.session() as session:
        assert session.files.read("x", start=start, stop=stop) == expected
        with pytest.raises(InvalidRequest):
            session.files.read("x", start=9, stop=9)


def test_a_server_without_range_support_is_an_error(atoll: Atoll, fake_server: FakeServer) -> None:
    fake_server.files["x"] = DATA
    with atoll.session() as session, pytest.raises(PermanentError, match="requested part"):
        session.files.read("x", start=5)


def test_a_download_resumes_after_a_lost_connection(
    atoll: Atoll, fake_server: FakeServer, tmp_path: Path
) -> None:
    fake_server.files["x"], fake_server.etags = DATA, True
    fake_server.cuts = [300_000, 0, 500_000]
    progress = Progress()
    with atoll.session() as session:
        session.files.download("x", tmp_path / "x", progress=progress)
        assert (tmp_path / "x").read_bytes() == DATA
        progress.check(len(DATA), len(DATA))
        fake_server.cuts = [1000]
        assert session.files.read("x", start=-5000) == DATA[-5000:]
        fake_server.cuts = [1000]
        assert session.files.read("x", start=7, stop=5000) == DATA[7:5000]


def test_a_download_never_mixes_two_versions(
    atoll: Atoll, fake_server: FakeServer, tmp_path: Path
) -> None:
    fake_server.files["x"], fake_server.etags, fake_server.cuts = DATA, True, [300_000]

    def change(size: int, total: int | None) -> None:
        fake_server.files["x"] = DATA[::-1]

    with atoll.session() as session, pytest.raises(Conflict) as caught:
        session.files.download("x", tmp_path / "x", progress=change)
    assert caught.value.code == "file_changed"
    assert list(tmp_path.iterdir()) == []


def test_a_download_gives_up_after_too_many_interruptions(
    atoll: Atoll, fake_server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "limit", 0.2)
    fake_server.files["x"], fake_server.etags, fake_server.cuts = DATA, True, [1000] + [0] * 100
    with atoll.session() as session, pytest.raises(TemporaryError):
        session.files.download("x", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


async def test_a_cancelled_download_leaves_nothing(
    async_atoll: AsyncAtoll, fake_server: FakeServer, tmp_path: Path
) -> None:
    fake_server.files["x"] = DATA
    begun, never = asyncio.Event(), asyncio.Event()

    async def hold(size: int, total: int | None) -> None:
        begun.set()
        await never.wait()

    async with async_atoll.session() as session:
        task = asyncio.create_task(session.files.download("x", tmp_path / "y", progress=hold))
        await begun.wait()
        assert len(names(tmp_path)) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert names(tmp_path) == []


def test_progress_callbacks_run_in_the_thread_of_the_caller(atoll: Atoll) -> None:
    threads: set[threading.Thread] = set()
    with atoll.session() as session:
        session.files.upload(DATA, "x", progress=lambda *_: threads.add(threading.current_thread()))
    assert threads == {threading.current_thread()}


def test_modes_and_conditions_are_sent(atoll: Atoll, fake_server: FakeServer) -> None:
    with atoll.session() as session:
        session.files.write("x", "a", overwrite=False, if_match='"e"')
        assert fake_server.headers["if-none-match"] == "*"
        assert fake_server.headers["if-match"] == '"e"'
        session.files.upload(b"a", "x", overwrite=False)
        assert fake_server.headers["if-none-match"] == "*"
        with pytest.raises(InvalidRequest, match="mode"):
            session.files.write("x", "a", mode=0o4755)
        with pytest.raises(RequestError):
            session.files.chmod("x", -1)


def test_a_file_watch_reconnects_with_an_overflow(atoll: Atoll, fake_server: FakeServer) -> None:
    fake_server.watched = [
        [("watching", {}), ("created", {"encoded_path": "a%FF"}), ("news", {})],
        [("watching", {}), ("end", {"code": "link_lost"})],
        [("watching", {}), ("overflow", {}), ("deleted", {"encoded_path": "d"})],
        [("end", {"code": "file_not_found"})],
    ]
    with atoll.session() as session:
        assert list(session.files.watch("d")) == [
            FileEvent("watching"),
            FileEvent("created", "a\udcff"),
            FileEvent("overflow"),
            FileEvent("overflow"),
            FileEvent("overflow"),
            FileEvent("deleted", "d"),
        ]
        with pytest.raises(Conflict):
            next(session.files.watch())
        fake_server.watched = [[("watching", {}), ("created", {"encoded_path": 7})]]
        with pytest.raises(PermanentError, match="not an event"):
            list(session.files.watch())


def test_a_checkpoint_is_created_and_fetched(atoll: Atoll) -> None:
    with atoll.session() as session:
        assert session.last_checkpoint() is None
        made = session.checkpoint()
        assert made.number == 1
        assert session.last_checkpoint() == made
