"""Long file requests to a real executor: trees, search, archives, copies, changes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import stat
import tarfile
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.executor.files.pack import MAX_IN_ZIP
from atoll.link.client import Link
from atoll.link.errors import ExecutorError
from tests.executors import Executor

pytestmark = pytest.mark.anyio

MiB = 1024 * 1024


@pytest.fixture
async def link(executor: Executor) -> AsyncIterator[Link]:
    connected = await executor.connect()
    yield connected
    connected.close()


@pytest.fixture
def root(executor: Executor, tmp_path: Path) -> Path:
    return tmp_path / "workspace"


def write(root: Path, **files: str) -> None:
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


async def refused(call: Any) -> str:
    with pytest.raises(ExecutorError) as caught:
        await call
    return caught.value.code


async def gathered(link: Link, op: str, **request: Any) -> bytes:
    _, content = await link.fetch(op, **request)
    return b"".join([piece async for piece in content])


async def sent(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def leftovers(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith(".atoll-")]


async def eventually(condition: Callable[[], bool]) -> None:
    """Poll a condition that has no event."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def workers(executor: Executor) -> list[int]:
    (pid,) = executor.children()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if Path(f"/proc/{child}/comm").read_text().strip() == "files"
    ]


# Trees


async def tree(link: Link, path: str = "", **request: Any) -> list[str]:
    """All of it, over pages of three."""
    found: list[str] = []
    after = None
    while True:
        fields: dict[str, Any] = {"path": path, "limit": 3, "seconds": 5, "after": after, **request}
        page = await link.call("tree", **fields)
        assert len(page["entries"]) <= 3
        found += [entry["path"] for entry in page["entries"]]
        after = page["next"]
        if after is None:
            return found


async def test_a_tree_is_listed_in_order_over_pages(link: Link, root: Path) -> None:
    write(root, a__b__c="", a__d="", b="")
    (root / "a" / "b-").write_text("")
    (root / "a" / "out").symlink_to("/etc")
    (root / ".tmp").mkdir()
    (root / ".atoll-trash-1").mkdir()

    assert await tree(link) == ["a", "a/b", "a/b/c", "a/b-", "a/d", "a/out", "b"]
    assert await tree(link, "a") == ["a/b", "a/b/c", "a/b-", "a/d", "a/out"]


@pytest.mark.parametrize(
    ("glob", "found"),
    [
        ("**/*.py", ["a.py", "x/b.py", "x/y/c.py"]),
        ("*.py", ["a.py"]),
        ("*/*.py", ["x/b.py"]),
        ("x/**", ["x", "x/b.py", "x/y", "x/y/c.py", "x/y/d.txt"]),
        ("**/[cd].*", ["x/y/c.py", "x/y/d.txt"]),
        ("**/y/?.py", ["x/y/c.py"]),
        ("nothing/**", []),
    ],
)
async def test_a_tree_is_filtered_by_a_pattern(
    link: Link, root: Path, glob: str, found: list[str]
) -> None:
    for name in ("a.py", "x/b.py", "x/y/c.py", "x/y/d.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")

    assert await tree(link, glob=glob) == found


async def test_a_list_continues_after_a_removed_entry(link: Link, root: Path) -> None:
    for name in ("a/1", "a/2", "b/1", "c"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("")
    page = await link.call("tree", path="", limit=2, seconds=5)
    assert page["next"] == "a/1"
    for name in ("a/1", "a/2"):
        (root / name).unlink()
    (root / "a").rmdir()

    rest = await link.call("tree", path="", limit=9, seconds=5, after=page["next"])
    assert [entry["path"] for entry in rest["entries"]] == ["b", "b/1", "c"]


async def test_a_page_takes_no_longer_than_requested(link: Link, root: Path) -> None:
    for number in range(50):
        (root / f"{number:02}").write_text("")

    page = await link.call("tree", path="", glob="nothing", limit=9, seconds=0)
    assert page == {"entries": [], "next": "00"}


async def test_an_invalid_pattern_is_refused(link: Link, root: Path) -> None:
    for glob in ("../*", "a/" * 100, "x" * 2000):
        assert await refused(tree(link, glob=glob)) == "bad_glob"


# Search


async def search(link: Link, query: str, **request: Any) -> list[tuple[str, int, int, str]]:
    found: list[tuple[str, int, int, str]] = []
    place: dict[str, Any] = {}
    while True:
        fields: dict[str, Any] = {
            "path": "",
            "limit": 2,
            "seconds": 5,
            "query": query,
            **place,
            **request,
        }
        page = await link.call("search", **fields)
        found += [(m["path"], m["line"], m["column"], m["text"]) for m in page["matches"]]
        if page["next"] is None:
            return found
        place = {"after": page["next"]["path"], "line": page["next"]["line"]}


async def test_lines_are_found_over_pages(link: Link, root: Path) -> None:
    write(root, a="one\ntwo x\nx three\r\nfour x", d__b="näx\n", e="none\n")
    (root / "binary").write_bytes(b"x\0x\n")
    (root / "latin").write_bytes(b"\xff x\n")
    (root / "link").symlink_to("a")

    assert await search(link, "x") == [
        ("a", 2, 5, "two x"), ("a", 3, 1, "x three"), ("a", 4, 6, "four x"),
        ("d/b", 1, 3, "näx"), ("latin", 1, 3, "\ufffd x"),
    ]  # fmt: skip
    assert [hit[0] for hit in await search(link, "X", ignore_case=True, glob="d/*")] == ["d/b"]
    assert await search(link, r"^t\w+ x$", regex=True) == [("a", 2, 1, "two x")]
    assert await search(link, "x", path="d") == [("d/b", 1, 3, "näx")]
    assert await search(link, "w.*x") == []


async def test_a_long_line_is_shown_around_the_match(link: Link, root: Path) -> None:
    write(root, a="y" * 10_000 + "needle" + "z" * 10_000)

    ((path, line, column, text),) = await search(link, "needle")
    assert (path, line, column) == ("a", 1, 10_001)
    assert "needle" in text
    assert len(text) == 400


@pytest.mark.slow
async def test_a_search_expression_that_never_ends_is_an_error(
    link: Link, root: Path, executor: Executor
) -> None:
    write(root, a="ok b\n", b="a" * 60 + "!\n", c="ok b\n")
    fields: dict[str, Any] = {
        "path": "",
        "regex": True,
        "limit": 10,
        "query": r"^(a+)+b|ok b",
    }
    asked = asyncio.create_task(link.call("search", seconds=5.0, **fields))
    await asyncio.sleep(0)  # Until it is sent.
    assert (await link.call("stat", path="a"))["entry"]["size"] == 5
    assert not asked.done(), "others wait for it"
    page = await asked
    # Earlier matches are returned; the next page cannot be read.
    assert [match["path"] for match in page["matches"]] == ["a"]
    place = {"after": page["next"]["path"], "line": page["next"]["line"]}
    fields["seconds"] = 1.0
    assert await refused(link.call("search", **fields, **place)) == "search_timeout"
    assert await refused(link.call("search", **{**fields, "query": "("})) == "bad_query"


# Archives


def fill(root: Path) -> None:
    write(root, dir__a="A" * 1000, dir__sub__b="B")
    (root / "dir" / "run").write_text("#!/bin/sh\n")
    (root / "dir" / "run").chmod(0o755)
    (root / "dir" / "link").symlink_to("sub/b")
    os.mkfifo(root / "dir" / "pipe")
    with open(os.path.join(os.fsencode(root), b"dir/\xff"), "w") as file:
        file.write("odd")
    (root / "dir" / ("n" * 200)).write_text("long")


@pytest.mark.parametrize("form", ["tar", "tar.gz"])
async def test_a_directory_becomes_a_tar(link: Link, root: Path, form: str) -> None:
    fill(root)
    data = await gathered(link, "pack", path="dir", form=form)
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as archive:
        members = {member.name: member for member in archive}
        assert sorted(members) == sorted(
            ["a", "link", "n" * 200, "run", "sub", "sub/b", os.fsdecode(b"\xff")]
        )
        assert members["run"].mode == 0o755
        assert members["link"].issym()
        assert members["link"].linkname == "sub/b"
        assert members["sub"].isdir()
        content = archive.extractfile(members["a"])
        assert content is not None
        assert content.read() == b"A" * 1000


async def test_a_directory_becomes_a_zip(link: Link, root: Path) -> None:
    fill(root)
    data = await gathered(link, "pack", path="dir", form="zip")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert sorted(archive.namelist()) == sorted(
            ["a", "link", "n" * 200, "run", "sub/", "sub/b", "%FF"]
        )
        info = archive.getinfo("link")
        assert stat.S_ISLNK(info.external_attr >> 16)
        assert archive.read("link") == b"sub/b"
        assert archive.getinfo("run").external_attr >> 16 & 0o777 == 0o755


@pytest.mark.parametrize("form", ["tar", "tar.gz", "zip"])
async def test_a_packed_directory_can_be_unpacked(link: Link, root: Path, form: str) -> None:
    fill(root)
    write(root, new__dir__a="old", new__kept="kept")
    data = await gathered(link, "pack", path="", form=form)
    pieces = [data[at : at + 1000] for at in range(0, len(data), 1000)]
    await link.push("unpack", sent(*pieces), path="new", form=form)

    assert (root / "new/dir/a").read_text() == "A" * 1000
    assert (root / "new/dir/link").readlink() == Path("sub/b")
    assert (root / "new/dir/run").stat().st_mode & 0o777 == 0o755
    assert (root / "new/kept").read_text() == "kept"
    assert leftovers(root) == []


def tar(*members: tuple[str, bytes, str | bytes]) -> bytes:
    """Name, kind, and content or the name that is linked to."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o4755
            if isinstance(content, str):
                info.linkname = content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def zipped(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


FILE = ("fine", tarfile.REGTYPE, b"fine")
HOSTILE = {
    "above": ("tar", tar(FILE, ("../evil", tarfile.REGTYPE, b"x"))),
    "above by a detour": ("tar", tar(FILE, ("a/../../evil", tarfile.REGTYPE, b"x"))),
    "absolute": ("tar", tar(FILE, ("/etc/evil", tarfile.REGTYPE, b"x"))),
    "through a link": (
        "tar",
        tar(FILE, ("l", tarfile.SYMTYPE, "/tmp"), ("l/evil", tarfile.REGTYPE, b"x")),
    ),
    "a directory over a link": (
        "tar",
        tar(("l", tarfile.SYMTYPE, "/tmp"), ("l", tarfile.DIRTYPE, ""), ("l/e", b"0", b"x")),
    ),
    "a hard link out": ("tar", tar(FILE, ("h", tarfile.LNKTYPE, "../../secret"))),
    "a hard link to what is not in it": ("tar", tar(FILE, ("h", tarfile.LNKTYPE, "there"))),
    "a hard link to a link": (
        "tar",
        tar(("l", tarfile.SYMTYPE, "/etc/passwd"), ("h", tarfile.LNKTYPE, "l")),
    ),
    "a device": ("tar", tar(FILE, ("null", tarfile.CHRTYPE, ""))),
    "a pipe": ("tar", tar(FILE, ("pipe", tarfile.FIFOTYPE, ""))),
    "too deep": ("tar", tar(("d/" * 200 + "f", tarfile.REGTYPE, b"x"))),
    "cut": ("tar", tar(FILE, ("big", tarfile.REGTYPE, b"x" * 9000))[:5000]),
    "nonsense": ("tar", b"nonsense" * 1000),
    "gzip of nonsense": ("tar", b"\x1f\x8b\x08\0\0\0\0\0\0\0nonsense"),
    "a zip with dots": ("zip", zipped(fine=b"fine", **{"../evil": b"x"})),
    "an absolute zip": ("zip", zipped(**{"/evil": b"x"})),
    "no zip": ("zip", b"PK\5\6nonsense"),
    "a broken zip": ("zip", zipped(fine=b"fine" * 100).replace(b"finefine", b"fxnefine", 1)),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_hostile_archive_leaves_nothing(link: Link, root: Path, kind: str) -> None:
    form, data = HOSTILE[kind]
    (root.parent / "secret").write_text("secret")
    write(root, there="there", fine="old")

    assert await refused(link.push("unpack", sent(data), path="", form=form)) == "bad_archive"
    assert sorted(os.listdir(root)) == ["fine", "there"]
    assert (root / "fine").read_text() == "old"
    assert not (root.parent / "evil").exists()


async def test_links_to_the_outside_are_kept_but_not_followed(link: Link, root: Path) -> None:
    data = tar(("l", tarfile.SYMTYPE, "/etc/passwd"), ("f", tarfile.REGTYPE, b"x"),
               ("h", tarfile.LNKTYPE, "f"))  # fmt: skip
    answer = await link.push("unpack", sent(data), path="", form="tar")

    assert answer == {"entries": 3}
    assert await refused(link.read("l")) == "bad_path"
    assert (root / "h").read_text() == "x"
    assert (root / "f").stat().st_mode & 0o7777 == 0o755  # No set-user-id.


async def test_a_directory_is_not_replaced_by_a_file(link: Link, root: Path) -> None:
    write(root, a__b="kept")
    data = tar(("new", tarfile.REGTYPE, b"x"), ("a", tarfile.REGTYPE, b"x"))

    assert await refused(link.push("unpack", sent(data), path="", form="tar")) == "file_exists"
    assert sorted(os.listdir(root)) == ["a"]


@pytest.mark.slow
async def test_a_header_that_announces_gigabytes_uses_no_memory(link: Link, root: Path) -> None:
    """A long name of many megabytes of zeros, as a few kilobytes of gzip."""
    import gzip

    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2 << 30
    head = info.tobuf(tarfile.GNU_FORMAT)
    data = gzip.compress(head + bytes(400 * MiB), 1)
    assert len(data) < 4 * MiB

    assert await refused(link.push("unpack", sent(data), path="", form="tar")) == "too_large"
    assert leftovers(root) == []


async def test_an_aborted_upload_of_a_tree_leaves_nothing(link: Link, root: Path) -> None:
    begun = asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield tar(FILE, ("big", tarfile.REGTYPE, b"x" * 100_000))[:50_000]
        begun.set()
        await asyncio.Event().wait()

    sending = asyncio.create_task(link.push("unpack", half(), path="", form="tar"))
    await begun.wait()
    await eventually(lambda: bool(leftovers(root)))
    sending.cancel()
    await eventually(lambda: not leftovers(root))
    assert os.listdir(root) == []


# Copies


async def test_a_tree_is_copied(link: Link, root: Path) -> None:
    fill(root)
    with (root / "dir" / "sparse").open("wb") as file:
        file.seek(64 * MiB)
        file.write(b"end")
    await link.call("copy", source="dir", target="deep/copy", overwrite=False)

    assert sorted(os.listdir(root / "deep/copy")) == sorted(
        name for name in os.listdir(root / "dir") if name != "pipe"
    )
    assert (root / "deep/copy/link").readlink() == Path("sub/b")
    assert (root / "deep/copy/run").stat().st_mode & 0o777 == 0o755
    copied, source = (root / "deep/copy/sparse").stat(), (root / "dir/sparse").stat()
    assert (copied.st_size, copied.st_mtime_ns) == (source.st_size, source.st_mtime_ns)
    assert copied.st_blocks * 512 < MiB
    await link.call("copy", source="deep", target="deep/inside", overwrite=False)
    assert os.listdir(root / "deep/inside") == ["copy"]


async def test_a_file_is_copied_and_overwrites_only_on_request(link: Link, root: Path) -> None:
    write(root, a="A", b="B")
    (root / "a").chmod(0o600)
    (root / "link").symlink_to("/etc/passwd")
    fields: dict[str, Any] = {"source": "a", "target": "b", "overwrite": False}

    assert await refused(link.call("copy", **fields)) == "file_exists"
    answer = await link.call("copy", **{**fields, "overwrite": True})
    assert (answer["entry"]["path"], answer["entry"]["mode"]) == ("b", 0o600)
    assert (root / "b").read_text() == "A"
    await link.call("copy", source="link", target="other", overwrite=False)
    assert (root / "other").readlink() == Path("/etc/passwd")
    gone = link.call("copy", source="no", target="x", overwrite=False)
    assert await refused(gone) == "file_not_found"
    assert await refused(link.call("copy", source="", target="x", overwrite=False)) == "bad_path"
    assert leftovers(root) == []


# Modes, parts and conditions


async def test_a_mode_is_set_on_files_but_not_through_links(link: Link, root: Path) -> None:
    write(root, a="A")
    (root / "a").chmod(0)
    (root / "link").symlink_to("a")

    assert (await link.call("chmod", path="a", mode=0o4750))["entry"]["mode"] == 0o750
    assert await refused(link.call("chmod", path="link", mode=0o777)) == "bad_path"
    assert (root / "a").stat().st_mode & 0o7777 == 0o750


@pytest.mark.parametrize(
    ("part", "content"),
    [
        ((0, 3), b"0123"), ((8, None), b"89"), ((None, 3), b"789"), ((5, 100), b"56789"),
        ((None, 100), b"0123456789"), ((10, None), None), ((None, 0), None),
    ],
)  # fmt: skip
async def test_a_part_of_a_file_can_be_read(
    link: Link, root: Path, part: tuple[int | None, int | None], content: bytes | None
) -> None:
    write(root, a="0123456789")
    entry, pieces = await link.read("a", part=part)
    found = b"".join([piece async for piece in pieces])

    assert found == (content or b"")
    assert (entry["start"] is None) == (content is None)
    assert entry["size"] == 10


async def test_a_range_of_another_version_is_the_complete_file(link: Link, root: Path) -> None:
    write(root, a="0123456789")
    entry, _ = await link.read("a", head=True)
    for tag, content in ((entry["etag"], b"01"), ("other", b"0123456789")):
        _, pieces = await link.read("a", part=(0, 1), if_range=tag)
        assert b"".join([piece async for piece in pieces]) == content


async def test_a_conditional_write_checks_the_current_file(link: Link, root: Path) -> None:
    made = await link.write("a", sent(b"1"), if_none_match=["*"])
    assert made["etag"] is not None
    again = link.write("a", sent(b"2"), if_none_match=["*"])
    assert await refused(again) == "precondition_failed"
    changed = await link.write("a", sent(b"3"), if_match=[made["etag"]])
    assert changed["etag"] != made["etag"]
    late = link.write("a", sent(b"4"), if_match=[made["etag"]])
    assert await refused(late) == "precondition_failed"
    nothing = link.write("b", sent(b"4"), if_match=["*"])
    assert await refused(nothing) == "precondition_failed"
    assert (root / "a").read_text() == "3"
    assert os.listdir(root) == ["a"]


# Notices


class Notices:
    def __init__(self, content: AsyncIterator[bytes]) -> None:
        self._content = content
        self._buffer = b""

    async def next(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            self._buffer += await anext(self._content)
        line, _, self._buffer = self._buffer.partition(b"\n")
        content: dict[str, Any] = json.loads(line)
        return content

    async def until(self, kind: str, path: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while True:
                notice = await self.next()
                if (notice["type"], notice["path"]) == (kind, path):
                    return notice


@pytest.mark.slow
@pytest.mark.parametrize("poll", [False, True], ids=["told", "looked at"])
async def test_changes_are_reported(link: Link, root: Path, poll: bool) -> None:
    (root / "d").mkdir()
    _, content = await link.fetch("follow", path="", recursive=True, poll=poll)
    notices = Notices(content)
    write(root, d__a="1")
    await notices.until("created", "d/a")
    write(root, d__a="22")
    await notices.until("modified", "d/a")
    (root / "d/a").rename(root / "b")
    moved = await notices.until("moved", "b")
    assert moved["from"] == "d/a"
    (root / "new/deep").mkdir(parents=True)
    await notices.until("created", "new/deep")
    write(root, new__deep__x="1")
    await notices.until("created", "new/deep/x")
    (root / "new").rename(root / "newer")
    await notices.until("moved", "newer")
    write(root, newer__deep__y="1")
    await notices.until("created", "newer/deep/y")
    (root / "b").unlink()
    await notices.until("deleted", "b")


@pytest.mark.slow
async def test_a_flood_of_changes_takes_bounded_memory_and_is_reported_as_overflow(
    link: Link, root: Path, executor: Executor
) -> None:
    _, content = await link.fetch("follow", path="", recursive=True)
    for number in range(60_000):
        # Twice as many as the kernel and the window keep.
        (root / f"{'x' * 40}{number}").touch()
    notices = Notices(content)
    missed = await notices.until("overflow", "")
    assert missed["type"] == "overflow"
    (root / "last").write_text("")
    await notices.until("created", "last")


async def test_a_watch_ends_with_its_directory_and_with_its_reader(
    link: Link, root: Path, executor: Executor
) -> None:
    (root / "d").mkdir()
    before = executor.supervisor()[1]
    _, content = await link.fetch("follow", path="d", recursive=True)
    (root / "d").rmdir()
    async with asyncio.timeout(60):
        assert [piece async for piece in content] == []
    _, content = await link.fetch("follow", path="", recursive=True)
    write(root, a="1")
    assert await anext(content)
    await content.aclose()  # type: ignore[attr-defined]
    await eventually(lambda: executor.supervisor()[1] <= before)


async def test_the_number_of_concurrent_requests_is_limited(link: Link, root: Path) -> None:
    watches = [await link.fetch("follow", path="", recursive=False) for _ in range(16)]

    assert await refused(link.fetch("follow", path="", recursive=False)) == "session_crowded"
    assert await tree(link) == []
    assert len(watches) == 16


async def test_a_worker_killed_by_user_code_fails_only_one_request(
    link: Link, root: Path, executor: Executor
) -> None:
    _, content = await link.fetch("follow", path="", recursive=True)
    (worker,) = workers(executor)
    os.kill(worker, 9)

    with pytest.raises(ExecutorError) as caught:
        await anext(content)
    assert caught.value.code == "file_error"
    assert await tree(link) == []


@pytest.mark.slow
async def test_a_zip_of_the_maximum_number_of_files_is_created_and_a_larger_one_refused(
    link: Link, root: Path
) -> None:
    (root / "many").mkdir()
    for number in range(MAX_IN_ZIP):
        os.close(os.open(root / "many" / f"{'n' * 60}{number}", os.O_CREAT))
    data = await gathered(link, "pack", path="many", form="zip")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert len(archive.namelist()) == MAX_IN_ZIP
    (root / "many" / "last").touch()
    packing = link.fetch("pack", path="many", form="zip")
    assert await refused(packing) == "too_many_entries"
