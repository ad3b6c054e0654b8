from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from atoll import InvalidRequest, NotFound, TemporaryError
from atoll.sdk.paths import url_path, workspace_path

if TYPE_CHECKING:
    from pathlib import Path

    from atoll import Atoll
    from tests.component.sdk.fake_server import FakeServer


def test_files_are_written_read_moved_and_removed(atoll: Atoll, fake_server: FakeServer) -> None:
    with atoll.session() as session:
        files = session.files
        assert files.write("a/ü b.txt", "héllo").path == "a/ü b.txt"
        assert files.read("/workspace/a/ü b.txt") == "héllo".encode()
        assert files.read_text("a/ü b.txt") == "héllo"
        assert files.stat("a/ü b.txt").size == 6
        with pytest.raises(InvalidRequest):
            files.write("number", 3)  # type: ignore[arg-type]
        assert files.mkdir("d").type == "directory"
        assert files.move("a/ü b.txt", "c?x=1#y").name == "c?x=1#y"
        assert files.read("c?x=1#y") == "héllo".encode()
        files.remove("c?x=1#y", recursive=True)
        assert fake_server.bodies[-1] == {"recursive": "true"}
        with pytest.raises(NotFound):
            files.stat("c?x=1#y")


def test_a_directory_is_listed_over_all_pages(atoll: Atoll) -> None:
    with atoll.session() as session:
        for name in "abcde":
            session.files.write(f"d/{name}", b"")
        assert [entry.name for entry in session.files.list("d")] == list("abcde")
        assert [entry.type for entry in session.files.list()] == ["directory"]


def test_large_files_are_streamed_in_both_directions(
    atoll: Atoll, fake_server: FakeServer, tmp_path: Path
) -> None:
    data = bytes(range(256)) * 8192
    source, target = tmp_path / "big.bin", tmp_path / "copy.bin"
    source.write_bytes(data)
    with atoll.session() as session:
        assert session.files.upload(source).size == len(data)
        assert fake_server.largest_chunk < len(data)
        assert session.files.download("big.bin", target) == target
        (tmp_path / "into").mkdir()
        assert session.files.download("big.bin", tmp_path / "into").name == "big.bin"
        assert session.files.download("big.bin", f"{tmp_path}/new/") == tmp_path / "new" / "big.bin"
        with pytest.raises(InvalidRequest):
            session.files.download("a/..", tmp_path)
    assert target.read_bytes() == data
    assert target.stat().st_mode & 0o777 == source.stat().st_mode & 0o777


def test_a_failed_download_keeps_the_old_file(
    atoll: Atoll, fake_server: FakeServer, tmp_path: Path
) -> None:
    fake_server.files["broken"] = b"x" * 200_000
    target = tmp_path / "kept"
    target.write_text("old")
    with atoll.session() as session, pytest.raises(TemporaryError):
        session.files.download("broken", target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("path", "plain", "url"),
    [
        ("a/b", "a/b", "a/b"),
        ("/workspace/a", "a", "a"),
        ("/workspace", ".", "%2E"),
        ("", ".", "%2E"),
        ("../x", "../x", "%2E%2E/x"),
        ("/etc/passwd", "/etc/passwd", "%2Fetc/passwd"),
        ("/workspaces", "/workspaces", "%2Fworkspaces"),
        ("a\n%2F", "a\n%2F", "a%0A%252F"),
        ("\udcff", "\udcff", "%FF"),
    ],
)
def test_a_path_never_leaves_its_url(path: str, plain: str, url: str) -> None:
    assert workspace_path(path) == plain
    assert url_path(path) == url
