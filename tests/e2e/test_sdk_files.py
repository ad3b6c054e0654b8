"""Files of the SDK, against a real server and an embedded one."""

from __future__ import annotations

import asyncio
import io
import os
import threading
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from atoll import AsyncAtoll, Atoll, Conflict, InvalidRequest, RequestError
from tests.component.sdk.test_sdk_tar import listing_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll import Session
    from tests.harness import Server

pytestmark = [pytest.mark.anyio, pytest.mark.quick]

BAD = "a\udcff"
"""A name whose bytes are not UTF-8."""


@pytest.fixture(params=["server", "embedded"])
def session(request: pytest.FixtureRequest, bubblewrap: str, tmp_path: Path) -> Iterator[Session]:
    if request.param == "embedded":
        client = Atoll(data_dir=tmp_path / "data", pool={"size": 0})
    else:
        server: Server = request.getfixturevalue("server")
        client = Atoll(server.url, api_key=server.key)
    with client as atoll, atoll.session() as session:
        yield session


def test_files_are_listed_changed_and_searched(session: Session) -> None:
    files = session.files
    entry = files.write("src/a.py", "import os  # TODO\n", mode=0o755)
    assert (entry.mode, entry.etag is not None) == ("0755", True)
    files.write("src/deep/b.py", "pass\n")
    files.write("c.txt", "todo\n")
    assert [entry.path for entry in files.list(recursive=True)] == [
        "c.txt", "src", "src/a.py", "src/deep", "src/deep/b.py",
    ]  # fmt: skip
    assert [entry.path for entry in files.list(glob="**/*.py")] == ["src/a.py", "src/deep/b.py"]
    (match,) = files.search("TODO")
    assert (match.path, match.line, match.column) == ("src/a.py", 1, 14)
    assert len(list(files.search("to.o", regex=True, ignore_case=True))) == 2
    assert files.copy("src", "copy").type == "directory"
    assert files.read_text("copy/deep/b.py") == "pass\n"
    assert files.chmod("c.txt", 0o600).mode == "0600"
    assert files.exists("c.txt")
    assert not files.exists("none")
    with pytest.raises(RequestError) as caught:
        files.write("c.txt", "", overwrite=False)
    assert caught.value.code == "precondition_failed"
    assert files.write("src/a.py", "new", if_match=entry.etag).etag != entry.etag
    with pytest.raises(RequestError):
        files.write("src/a.py", "newer", if_match=entry.etag)
    assert files.read("src/a.py", start=1) == b"ew"
    assert files.read("src/a.py", start=-1) == b"w"
    assert files.read("src/a.py", start=0, stop=2) == b"ne"
    assert files.read("src/a.py", start=3) == b""
    files.remove("src", recursive=True)


def test_names_that_are_not_utf8_work(session: Session, tmp_path: Path) -> None:
    files = session.files
    assert files.write(BAD, "1").path == BAD
    files.mkdir("\udcff")
    assert files.move(BAD, f"\udcff/x{BAD}").name == f"x{BAD}"
    (directory,) = files.list()
    (entry,) = files.list(directory.path)
    assert (directory.path, entry.path) == ("\udcff", f"\udcff/x{BAD}")
    assert files.read(entry.path) == b"1"
    assert files.stat(entry.path) == entry
    assert [match.path for match in files.search("1")] == [entry.path]
    assert files.download(entry.path, tmp_path).name == f"x{BAD}"
    files.mkdir(f"made{BAD}")
    files.remove(directory.path, recursive=True)
    assert [found.path for found in files.list()] == [f"made{BAD}"]


def test_a_tree_is_uploaded_and_downloaded(session: Session, tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "d" / "e").mkdir(parents=True)
    for number in range(300):
        (source / "d" / f"{number}.txt").write_text(str(number))
    (source / "d" / "run").write_bytes(os.urandom(700_000))
    (source / "d" / "run").chmod(0o750)
    (source / "l").symlink_to("d/run")
    Path(os.fsdecode(os.fsencode(source) + b"/\xff")).write_bytes(b"no text")
    (source / ("long" * 60)).mkdir()
    (source / ("long" * 60) / ("name" * 60)).write_bytes(b"")

    tree = session.files.upload_tree(source, "to/there")
    assert (tree.path, tree.files) == ("to/there", 303)
    done = session.run("import os; print(os.readlink('to/there/l'), os.access('to/there/l', 1))")
    assert done.stdout == "d/run True\n"
    back = session.files.download_tree("to/there", tmp_path / "out")
    assert (back.files, back.size, back.left_out) == (tree.files, tree.size, ())
    assert listing_of(tmp_path / "out") == listing_of(source)
    assert (tmp_path / "out" / "d" / "run").stat().st_mode & 0o777 == 0o750


def test_code_inside_cannot_make_a_download_write_outside(session: Session, tmp_path: Path) -> None:
    code = """
import os
os.makedirs("d/real")
os.symlink("/etc", "d/etc")
os.symlink("..", "d/up")
os.symlink("real/../../..", "d/far")
os.symlink("real", "d/fine")
os.mkfifo("d/pipe")
open("d/x", "w").write("x")
"""
    session.run(code).check()
    tree = session.files.download_tree("d", tmp_path / "out")
    assert listing_of(tmp_path / "out") == {"real": "dir", "fine": "-> real", "x": b"x"}
    assert [text.partition(":")[0] for text in tree.left_out] == ["etc", "far", "up"]
    with pytest.raises(InvalidRequest):
        session.files.download_tree("d/..", tmp_path / "other")


def test_a_failed_upload_keeps_the_old_files(session: Session) -> None:
    session.files.write("x", "old")

    def failing() -> Iterator[bytes]:
        yield b"new" * 100_000
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        session.files.upload(failing(), "x")
    assert session.files.read("x") == b"old"
    assert [entry.name for entry in session.files.list()] == ["x"]


def test_file_changes_are_watched(session: Session) -> None:
    received: list[tuple[str, str]] = []
    for event in session.files.watch():
        received.append((event.kind, event.path))
        if event.kind == "watching":
            session.run("open('made', 'w').close(); import os; os.rename('made', 'moved')").check()
        if event.kind == "moved":
            assert event.moved_from == "made"
            break
    assert received[0] == ("watching", "")
    assert received[-1] == ("moved", "moved")


def test_artifacts_are_listed_and_downloaded(session: Session, tmp_path: Path) -> None:
    execution = session.submit("open('out.txt', 'w').write('1'); open('b.log', 'w').write('2')")
    execution.wait()
    listed = execution.artifacts()
    assert [(artifact.path, artifact.type) for artifact in listed] == [
        ("b.log", "log"),
        ("out.txt", "artifact"),
    ]
    assert execution.download(listed[1], tmp_path).read_text() == "1"
    assert execution.download("b.log", tmp_path / "x").read_text() == "2"
    of_session = list(session.artifacts())
    assert [artifact.path for artifact in of_session] == ["b.log", "out.txt"]
    assert of_session[0].execution_id == execution.id
    assert session.files.download(of_session[0], tmp_path).name == "b.log"


def test_a_checkpoint_is_created_and_listed(session: Session) -> None:
    session.files.write("a", "12345")
    made = session.checkpoint()
    assert (made.session_id, made.files, made.size) == (session.id, 1, 5)
    assert session.last_checkpoint() == made


def test_a_link_needs_no_key(server: Server) -> None:
    with Atoll(server.url, api_key=server.key) as atoll, atoll.session() as session:
        session.files.write("x", "through a link")
        link = session.files.presign("x", expires_in=60)
        with urllib.request.urlopen(link.url) as answer:
            assert answer.read() == b"through a link"
        there = session.files.presign("y", method="PUT")
        request = urllib.request.Request(there.url, b"put", method="PUT")
        with urllib.request.urlopen(request):
            assert session.files.read("y") == b"put"


async def test_files_work_in_async_code(server: Server, tmp_path: Path) -> None:
    async with AsyncAtoll(server.url, api_key=server.key) as atoll, atoll.session() as session:
        files, reported = session.files, []

        async def progress(size: int, total: int | None) -> None:
            reported.append((size, total))

        data = os.urandom(3_000_000)
        await files.upload(io.BytesIO(data), "big", progress=progress)
        assert reported[-1] == (len(data), len(data))
        await files.download("big", tmp_path / "big", progress=progress)
        assert reported[-1] == (len(data), len(data))
        assert b"".join([piece async for piece in files.stream("big", start=5)]) == data[5:]
        await files.mkdir("d")
        watching = files.watch("d")
        assert (await anext(watching)).kind == "watching"
        await files.remove("d")
        assert [event.kind async for event in watching] in ([], ["deleted"])
        await asyncio.gather(*(files.write(f"many/{n}", str(n)) for n in range(20)))
        tree = await files.download_tree("many", tmp_path / "many")
        assert tree.files == 20


def test_two_threads_share_one_client(server: Server, tmp_path: Path) -> None:
    with Atoll(server.url, api_key=server.key) as atoll, atoll.session() as session:
        data = [os.urandom(500_000) for _ in range(4)]

        def work(number: int) -> None:
            session.files.upload(data[number], f"f{number}")
            session.files.download(f"f{number}", tmp_path / f"f{number}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [(tmp_path / f"f{number}").read_bytes() for number in range(4)] == data


def test_an_upload_over_a_directory_changes_nothing(session: Session, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("a")
    (tmp_path / "in" / "b").write_text("b")
    session.files.mkdir("to/b")
    with pytest.raises((Conflict, InvalidRequest)):
        session.files.upload_tree(tmp_path / "in", "to")
    assert [entry.path for entry in session.files.list("to", recursive=True)] == ["to/b"]
