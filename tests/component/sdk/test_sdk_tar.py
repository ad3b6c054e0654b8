"""Directories as tar streams, including archives of a malicious server."""

from __future__ import annotations

import asyncio
import io
import os
import stat
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from atoll import InvalidRequest, PermanentError, TemporaryError
from atoll.sdk.tar_pack import TarPacker
from atoll.sdk.tar_unpack import MAX_DEPTH, MAX_EXTENSION, TarUnpacker

if TYPE_CHECKING:
    from atoll import AsyncAtoll, Atoll
    from tests.component.sdk.fake_server import FakeServer

pytestmark = pytest.mark.anyio


def entry(name: str, data: bytes = b"", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=kind, linkname=target)


def tar(*entries: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=form) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def unpack(data: bytes, top: Path, step: int = 1000) -> TarUnpacker:
    unpacker = TarUnpacker(top)
    try:
        for start in range(0, len(data), step):
            unpacker.feed(data[start : start + step])
        unpacker.finish()
    finally:
        unpacker.close()
    return unpacker


def listing_of(top: Path) -> dict[str, object]:
    """All entries below a directory with their relevant attributes."""
    found: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        name, mode = str(path.relative_to(top)), path.lstat().st_mode
        if stat.S_ISLNK(mode):
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = "dir" if stat.S_ISDIR(mode) else path.read_bytes()
    return found


# Both ways


@pytest.mark.parametrize("step", [1, 511, 512, 1000, 10**9])
def test_a_tree_survives_packing_and_unpacking_in_any_chunks(tmp_path: Path, step: int) -> None:
    source = tmp_path / "source"
    deep = source / "d" / ("long" * 50) / ("name" * 30)
    deep.mkdir(parents=True)
    (deep / "ü").write_bytes(b"x" * 513)
    (source / "empty").write_bytes(b"")
    (source / "bytes").write_bytes(bytes(range(256)) * 4)
    (source / "run").write_bytes(b"#!")
    (source / "run").chmod(0o700)
    (source / "link").symlink_to("d")
    (source / "up").mkdir()
    (source / "up" / "back").symlink_to("../bytes")
    (source / "hollow").mkdir()
    Path(os.fsdecode(os.fsencode(source) + b"/\xff\xfe")).write_bytes(b"no text")
    os.utime(source / "bytes", (1_000_000, 1_000_000))

    packer = TarPacker(source)
    done = unpack(b"".join(packer), tmp_path / "target", step)

    assert listing_of(tmp_path / "target") == listing_of(source)
    assert (done.files, done.size) == (packer.files, packer.size) == (5, 513 + 1024 + 2 + 7)
    assert (tmp_path / "target" / "run").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "target" / "bytes").stat().st_mtime == 1_000_000
    assert done.left_out == []


def test_a_tree_is_uploaded_and_downloaded(
    atoll: Atoll, fake_server: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "in" / "d").mkdir(parents=True)
    (tmp_path / "in" / "a").write_bytes(b"a" * 300_000)
    (tmp_path / "in" / "d" / "b").write_bytes(b"b")
    (tmp_path / "in" / "l").symlink_to("d/b")
    os.mkfifo(tmp_path / "in" / "pipe")
    progress_calls: list[tuple[int, int | None]] = []
    with atoll.session() as session:
        tree = session.files.upload_tree(
            tmp_path / "in", "to", progress=lambda *told_: progress_calls.append(told_)
        )
        assert (tree.path, tree.files, tree.size) == ("to", 2, 300_001)
        assert tree.left_out == ("pipe: a pipe",)
        assert progress_calls[-1] == (300_001, 300_001)
        assert progress_calls == sorted(set(progress_calls))
        progress_calls.clear()
        tree = session.files.download_tree(
            "to", tmp_path / "out", progress=lambda *told_: progress_calls.append(told_)
        )
        assert (tree.path, tree.files, tree.size) == (str(tmp_path / "out"), 2, 300_001)
        assert [total for _, total in progress_calls] == [None] * len(progress_calls)
        assert [size for size, _ in progress_calls][-1] == 300_001
    (tmp_path / "in" / "pipe").unlink()
    assert listing_of(tmp_path / "out") == listing_of(tmp_path / "in")


def test_a_tree_that_cannot_be_read_is_not_sent(
    atoll: Atoll, fake_server: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(b"a")
    with atoll.session() as session:
        with pytest.raises(FileNotFoundError):
            session.files.upload_tree(tmp_path / "none", "to")
        with pytest.raises(NotADirectoryError):
            session.files.upload_tree(tmp_path / "a", "to")
    assert fake_server.files == {}


def test_a_shrinking_file_fails_the_upload(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 1_000_000)
    pieces = iter(TarPacker(tmp_path))
    next(pieces)
    os.truncate(tmp_path / "a", 10)
    with pytest.raises(InvalidRequest, match="shrank"):
        list(pieces)


# A server that means no good


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", "..", "//x", "a/..", "x\0y"], ids=repr
)
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_a_name_that_points_outside_is_an_error(tmp_path: Path, name: str, form: int) -> None:
    kinds = [entry(name, b"evil"), link(name, "a"), entry(name, type=tarfile.DIRTYPE)]
    for one in kinds:
        if "\0" in name:
            # A header ends names there; a record does not.
            one[0].pax_headers = {"path": name}
            one[0].name = "x"
            if form != tarfile.PAX_FORMAT:
                continue
        with pytest.raises(InvalidRequest) as caught:
            unpack(tar(entry("ok", b"1"), one, form=form), tmp_path / "out")
        assert caught.value.code == "unsafe_name"
    assert [path.name for path in tmp_path.iterdir()] in (["out"], [])
    assert listing_of(tmp_path / "out" if (tmp_path / "out").exists() else tmp_path) in (
        {"ok": b"1"},
        {},
    )


@pytest.mark.parametrize(
    "target",
    ["/etc/passwd", "..", "../x", "d/..", "d/../..", "../out/x", "", "./../x", "d/../../x"],
    ids=repr,
)
def test_a_link_that_could_point_outside_is_skipped(tmp_path: Path, target: str) -> None:
    done = unpack(tar(link("l", target), link("hard", target, tarfile.LNKTYPE)), tmp_path / "out")
    assert listing_of(tmp_path / "out") == {}
    assert [text.partition(":")[0] for text in done.left_out] == ["l", "hard"]


def test_nothing_is_written_through_a_link_of_the_archive(tmp_path: Path) -> None:
    (tmp_path / "fake_server").mkdir()
    for entries in (
        [entry("d", type=tarfile.DIRTYPE), link("l", "d"), entry("l/x", b"evil")],
        [entry("d/x", b"good"), link("l", "d/x"), entry("l", b"evil")],
    ):
        with_link = tar(*entries)
        if entries[-1][0].name == "l":
            unpack(with_link, tmp_path / "b")
            assert listing_of(tmp_path / "b") == {"d": "dir", "d/x": b"good", "l": b"evil"}
        else:
            with pytest.raises(InvalidRequest) as caught:
                unpack(with_link, tmp_path / "a")
            assert caught.value.code == "local_conflict"
            assert listing_of(tmp_path / "a") == {"d": "dir", "l": "-> d"}


def test_nothing_is_written_through_an_existing_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_bytes(b"kept")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "d").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "out" / "f").symlink_to(tmp_path / "elsewhere" / "kept")
    unpack(tar(entry("f", b"new")), tmp_path / "out")
    assert not (tmp_path / "out" / "f").is_symlink()
    with pytest.raises(InvalidRequest) as caught:
        unpack(tar(entry("d/kept", b"evil")), tmp_path / "out")
    assert caught.value.code == "local_conflict"
    assert listing_of(tmp_path / "elsewhere") == {"kept": b"kept"}


def test_a_file_does_not_replace_a_directory_nor_the_other_way_round(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "f").write_bytes(b"f")
    for one in (entry("d", b"x"), link("d", "f"), entry("f/x", b"x")):
        with pytest.raises(InvalidRequest) as caught:
            unpack(tar(one), tmp_path)
        assert caught.value.code == "local_conflict"
    assert listing_of(tmp_path) == {"d": "dir", "f": b"f"}


def test_set_user_id_bits_are_dropped_and_rights_are_not_widened(tmp_path: Path) -> None:
    entries = [
        entry("d", type=tarfile.DIRTYPE, mode=0o6555),
        entry("d/x", b"x", mode=0o6711),
        entry("r", b"r", mode=0o400),
    ]
    unpack(tar(*entries), tmp_path / "out")
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (tmp_path / "out").rglob("*")}
    umask = os.umask(0o022)
    os.umask(umask)
    assert modes == {"d": 0o555 & ~umask, "x": 0o711 & ~umask, "r": 0o400}
    (tmp_path / "out" / "d").chmod(0o755)


@pytest.mark.parametrize("kind", [tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE])
def test_devices_and_pipes_are_skipped(tmp_path: Path, kind: bytes) -> None:
    done = unpack(tar(entry("p", type=kind), entry("x", b"x")), tmp_path)
    assert listing_of(tmp_path) == {"x": b"x"}
    assert done.left_out == ["p: not a file, directory or link"]


def damaged() -> dict[str, bytes]:
    good = tar(entry("x", b"x" * 2000))
    huge = entry("h", type=tarfile.XHDTYPE)
    huge[0].size = MAX_EXTENSION + 1
    record = entry("h", b"99999999 path=x\n", type=tarfile.XHDTYPE)
    digits = entry("h", b"000000005" + b"0" * 5000 + b" a=b\n", type=tarfile.XHDTYPE)
    sizes = entry("x", b"")
    sizes[0].pax_headers = {"size": "-5"}
    sparse = entry("x", b"")
    sparse[0].pax_headers = {"GNU.sparse.major": "1"}
    return {
        "cut in a header": good[:300],
        "cut in a file": good[:1500],
        "cut behind a file": good[: 512 + 2048],
        "nothing": b"",
        "noise": os.urandom(2048),
        "a wrong sum": good[:10] + b"y" + good[11:],
        "a header without end": huge[0].tobuf() + bytes(1024),
        "a record without end": tar(record),
        "a length of 5,000 digits": tar(digits),
        "a negative size": tar(sizes),
        "sparse": tar(sparse),
        "sparse, old": tar(entry("x", type=tarfile.GNUTYPE_SPARSE)),
        "an unknown kind": tar(entry("x", type=b"Q")),
        "no name": tar(entry("./", b"x")),
        "too deep": tar(entry("/".join("d" * (MAX_DEPTH + 2)), b"x")),
    }


@pytest.mark.parametrize("how", damaged())
def test_a_damaged_archive_is_an_error_and_leaves_no_partial_file(tmp_path: Path, how: str) -> None:
    with pytest.raises(PermanentError) as caught:
        unpack(damaged()[how], tmp_path / "out")
    assert caught.value.code == "bad_answer"
    assert [path for path in (tmp_path / "out").rglob("*") if path.suffix == ".part"] == []


def test_a_server_cannot_write_elsewhere(
    atoll: Atoll, fake_server: FakeServer, tmp_path: Path
) -> None:
    fake_server.archive = tar(entry("fine", b"1"), entry("../evil", b"2"))
    with atoll.session() as session, pytest.raises(InvalidRequest):
        session.files.download_tree("d", tmp_path / "out")
    assert listing_of(tmp_path) == {"out": "dir", "out/fine": b"1"}


def test_a_truncated_archive_is_an_error(
    atoll: Atoll, fake_server: FakeServer, tmp_path: Path
) -> None:
    fake_server.archive = tar(entry("x", b"x" * 5000))[:3000]
    with atoll.session() as session, pytest.raises((PermanentError, TemporaryError)):
        session.files.download_tree("d", tmp_path / "out")
    assert listing_of(tmp_path / "out") == {}


async def test_a_cancelled_tree_leaves_no_partial_file(
    async_atoll: AsyncAtoll, fake_server: FakeServer, tmp_path: Path
) -> None:
    fake_server.archive = tar(entry("a", b"a"), entry("x", b"x" * 3_000_000))
    begun, never = asyncio.Event(), asyncio.Event()

    async def hold(size: int, total: int | None) -> None:
        if size > 1:
            begun.set()
            await never.wait()

    async with async_atoll.session() as session:
        work = session.files.download_tree("d", tmp_path / "out", progress=hold)
        task = asyncio.create_task(work)
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert listing_of(tmp_path / "out") == {"a": b"a"}
