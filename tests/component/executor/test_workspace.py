"""Paths of the files API below a root that user code writes to."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path

import pytest

from atoll.executor.files import removal
from atoll.executor.files import workspace as workspace_module
from atoll.executor.files.paths import FileError, split
from atoll.executor.files.workspace import Workspace
from tests.unit.executor.descriptors import held


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "f").write_text("outside")
    top = tmp_path / "workspace"
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "f").write_text("inside")
    return top


@pytest.fixture
def workspace(root: Path) -> Workspace:
    return Workspace(str(root))


def read(workspace: Workspace, path: str) -> bytes:
    fd, _ = workspace.open(path)
    with open(fd, "rb") as file:
        return file.read()


def code(call: object, *arguments: object) -> str:
    with pytest.raises(FileError) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value.code


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("", []), ("/workspace", []), ("/workspace/", []), (".", []), ("a", ["a"]),
        ("/workspace/a//b/./c", ["a", "b", "c"]), ("a/b/", ["a", "b"]), ("...", ["..."]),
        ("a\nb", ["a\nb"]), ("..a", ["..a"]), ("~", ["~"]),
    ],
)  # fmt: skip
def test_a_path_is_split_into_its_parts(path: str, parts: list[str]) -> None:
    assert split(path) == parts


@pytest.mark.parametrize(
    "path",
    ["..", "../a", "a/..", "a/../b", "/", "/etc/passwd", "//workspace/a", "/workspaces/a",
     "/workspace/../a", "a\0b", "\0", "./.."],
)  # fmt: skip
def test_a_path_that_could_lead_outside_is_refused(path: str) -> None:
    assert code(split, path) == "bad_path"


@pytest.mark.parametrize(
    "link", ["../secret", "../outside/f", "/etc/passwd", "a/../../secret", "../workspace/../secret"]
)
def test_a_link_to_the_outside_is_refused(root: Path, workspace: Workspace, link: str) -> None:
    (root / "link").symlink_to(link)
    assert code(workspace.open, "link") == "bad_path"
    assert workspace.stat("link")["type"] == "symlink"


def test_a_link_to_a_directory_outside_is_not_followed(root: Path, workspace: Workspace) -> None:
    (root / "out").symlink_to("../outside")
    assert code(workspace.open, "out/f") == "bad_path"
    assert code(workspace.stat, "out/f") == "bad_path"
    assert code(workspace.list, "out", "", 10) == "bad_path"
    assert code(workspace.mkdir, "out/new", True) == "bad_path"
    assert code(workspace.upload, "out/new", 0o644) == "bad_path"
    assert code(workspace.remove, "out/f", False) == "bad_path"
    assert code(workspace.move, "out/f", "here", False) == "bad_path"
    assert code(workspace.move, "a/f", "out/there", False) == "bad_path"
    assert os.listdir(root.parent / "outside") == ["f"]


def test_links_that_stay_inside_work(root: Path, workspace: Workspace) -> None:
    (root / "to-file").symlink_to("a/f")
    (root / "to-directory").symlink_to(root / "a")
    assert read(workspace, "to-file") == b"inside"
    assert read(workspace, "to-directory/f") == b"inside"
    assert len(workspace.list("to-directory", "", 10)["entries"]) == 2


@pytest.mark.parametrize("count", [2, 45, 3000])
def test_circular_links_and_long_chains_are_refused(
    root: Path, workspace: Workspace, count: int
) -> None:
    for number in range(count):
        (root / f"l{number}").symlink_to(f"l{(number + 1) % count}")
    assert code(workspace.open, "l0") in ("bad_path", "file_not_found")
    assert code(workspace.list, "l0", "", 10) in ("bad_path", "file_not_found", "not_directory")


@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_only_regular_files_are_read(root: Path, workspace: Workspace, kind: str) -> None:
    os.mkfifo(root / "x") if kind == "pipe" else (root / "x").mkdir()
    assert code(workspace.open, "x") in ("not_a_file", "is_directory")


def test_an_upload_appears_completely_or_not_at_all(root: Path, workspace: Workspace) -> None:
    upload = workspace.upload("new/deep/file", 0o600)
    upload.write(b"half")
    assert not (root / "new/deep/file").exists()
    upload.write(b" and half")
    entry = upload.finish()
    assert (entry["path"], entry["size"], entry["mode"]) == ("new/deep/file", 13, 0o600)
    assert (root / "new/deep/file").read_bytes() == b"half and half"
    second = workspace.upload("new/deep/file", 0o644)
    second.write(b"x")
    second.abandon()
    assert os.listdir(root / "new/deep") == ["file"]
    assert (root / "new/deep/file").read_bytes() == b"half and half"


def test_an_upload_replaces_links_and_pipes_by_a_file(root: Path, workspace: Workspace) -> None:
    (root / "link").symlink_to("../secret")
    os.mkfifo(root / "pipe")
    for name in ("link", "pipe"):
        upload = workspace.upload(name, 0o644)
        upload.write(b"new")
        upload.finish()
        assert stat.S_ISREG((root / name).lstat().st_mode)
    assert (root.parent / "secret").read_text() == "secret"


def test_an_upload_has_no_setuid_bits(root: Path, workspace: Workspace) -> None:
    upload = workspace.upload("f", 0o6777)
    upload.finish()
    assert (root / "f").stat().st_mode & 0o7000 == 0


def test_a_listing_is_paged_by_name(root: Path, workspace: Workspace) -> None:
    names = sorted([*(f"n{number:03}" for number in range(25)), "é", "\n", "z" * 255])
    (root / "many").mkdir()
    for name in names:
        (root / "many" / name).touch()
    (Path(os.fsdecode(os.fsencode(root) + b"/many/\xff"))).touch()
    seen: list[str] = []
    after = ""
    while True:
        page = workspace.list("many", after, 7)
        seen += [item["path"].partition("/")[2] for item in page["entries"]]
        if page["next"] is None:
            break
        after = page["next"]
    assert seen == sorted([*names, "\udcff"])


def test_a_move_overwrites_only_on_request(root: Path, workspace: Workspace) -> None:
    (root / "other").write_text("other")
    assert code(workspace.move, "a/f", "other", False) == "file_exists"
    workspace.move("a/f", "other", True)
    assert (root / "other").read_text() == "inside"
    assert code(workspace.move, "a", "a/b/c", False) == "bad_path"


@pytest.mark.parametrize("path", ["", "/workspace", "."])
def test_the_workspace_itself_cannot_be_removed_moved_or_replaced(
    workspace: Workspace, path: str
) -> None:
    assert code(workspace.remove, path, True) == "bad_path"
    assert code(workspace.move, path, "x", False) == "bad_path"
    assert code(workspace.upload, path, 0o644) == "bad_path"
    assert workspace.stat(path)["type"] == "directory"


def deep(root: Path, levels: int) -> None:
    here = os.open(root, os.O_DIRECTORY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


def test_a_tree_of_any_depth_is_removed(
    root: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace_module, "REMOVE_SECONDS", 250.0)
    (root / "deep").mkdir()
    deep(root / "deep", 5000)
    workspace.remove("deep", True)
    assert sorted(os.listdir(root)) == ["a"]


def test_removing_follows_no_link(root: Path, workspace: Workspace) -> None:
    (root / "tree/sub").mkdir(parents=True)
    (root / "tree/sub/out").symlink_to("../../../outside")
    (root / "tree/f").symlink_to("../../secret")
    workspace.remove("tree", True)
    assert (root.parent / "secret").read_text() == "secret"
    assert os.listdir(root.parent / "outside") == ["f"]
    assert not (root / "tree").exists()


def test_a_directory_that_is_not_empty_is_removed_only_on_request(
    root: Path, workspace: Workspace
) -> None:
    assert code(workspace.remove, "a", False) == "not_empty"
    assert (root / "a/f").exists()


def test_emptying_removes_everything_whatever_its_permissions(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "x/y/z").mkdir(parents=True)
    (top / "x/y/z/f").touch()
    (top / "file").touch()
    for path in ("x/y/z", "x/y", "x"):
        (top / path).chmod(0)
    fd = os.open(top, os.O_DIRECTORY)
    try:
        removal.empty(fd, math.inf)
    finally:
        os.close(fd)
    assert os.listdir(top) == []


def test_descriptors_are_closed(root: Path, workspace: Workspace) -> None:
    places = (root.parent, Path("/etc"))
    before = held(*places)
    (root / "out").symlink_to("/etc")
    for _ in range(50):
        for call, arguments in (
            (workspace.open, ("nothing",)), (workspace.open, ("out/passwd",)),
            (workspace.open, ("a",)), (workspace.list, ("nothing", "", 5)),
            (workspace.mkdir, ("a/f/x", True)), (workspace.upload, ("a", 0o644)),
            (workspace.upload, ("x" * 300, 0o644)), (workspace.move, ("nothing", "y", False)),
        ):  # fmt: skip
            code(call, *arguments)
    assert held(*places) == before


def test_unfinished_uploads_are_not_listed(root: Path, workspace: Workspace) -> None:
    upload = workspace.upload("a/new", 0o644)
    (root / f"{removal.TRASH}1").mkdir()
    assert [item["path"] for item in workspace.list("", "", 10)["entries"]] == ["a"]
    assert [item["path"] for item in workspace.list("a", "", 10)["entries"]] == ["a/b", "a/f"]
    upload.abandon()


def test_a_removal_that_runs_out_of_time_is_completed_by_the_next(
    root: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (root / name / "sub").mkdir(parents=True)
        (root / name / "sub/f").touch()
    monkeypatch.setattr(workspace_module, "REMOVE_SECONDS", -1.0)
    assert code(workspace.remove, "one", True) == "not_empty"
    assert [item["path"] for item in workspace.list("", "", 10)["entries"]] == ["a", "two"]
    monkeypatch.setattr(workspace_module, "REMOVE_SECONDS", 60.0)
    workspace.remove("two", True)
    assert os.listdir(root) == ["a"]


def test_a_repeated_removal_is_completed(
    root: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace_module, "REMOVE_SECONDS", -1.0)
    assert code(workspace.remove, "a", True) == "not_empty"
    monkeypatch.setattr(workspace_module, "REMOVE_SECONDS", 60.0)
    assert code(workspace.remove, "a", True) == "file_not_found"
    assert os.listdir(root) == []
