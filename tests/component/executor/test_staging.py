"""Files that an execution has staged, and where they are afterwards."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.executor.event_loop import Loop
from atoll.executor.files import artifacts
from atoll.executor.files.paths import STAGING
from atoll.executor.files.staging import MAX_DEPTH, Staging
from atoll.executor.files.workspace import Workspace

RUN = "exec_1"
Problem = dict[str, str]
Settle = Callable[[bool], Problem | None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "f").write_text("outside")
    top = tmp_path / "workspace"
    top.mkdir()
    return top


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def staging(loop: Loop, root: Path) -> Staging:
    return Staging(loop, str(root))


@pytest.fixture
def area(staging: Staging) -> Path:
    return Path(staging.make(RUN))


@pytest.fixture
def settle(staging: Staging, loop: Loop) -> Settle:
    """Ends the run, and lets the loop do all of it; what kept its files from being moved."""

    def settle(keep: bool) -> Problem | None:
        problems: list[Problem | None] = []
        staging.settle(RUN, keep, False, problems.append)
        finish(loop)
        assert len(problems) == 1
        return problems[0]

    return settle


def finish(loop: Loop) -> None:
    """Let the loop run until nothing is due any more."""

    def look() -> None:
        loop.running = any(timer.call is not None for _, _, timer in loop._timers)
        if loop.running:
            loop.after(0.0, look)

    loop.running = True
    loop.after(0.0, look)
    loop.run()


def tree(path: Path) -> dict[str, str]:
    return {
        str(item.relative_to(path)): item.read_text()
        for item in sorted(path.rglob("*"))
        if item.is_file()
    }


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def leftovers(root: Path) -> list[str]:
    """Leftovers of the executor in the workspace."""
    left = [str(path.relative_to(root)) for path in root.rglob("*")]
    return [name for name in left if name.startswith(".") and name != STAGING]


def test_the_staging_area_is_created_in_the_workspace(
    root: Path, area: Path, staging: Staging
) -> None:
    assert area == root / ".tmp" / RUN
    assert area.is_dir()
    assert staging.make(RUN) == str(area)


def test_the_next_run_gets_an_area_that_is_left_empty(area: Path, staging: Staging) -> None:
    inode = area.stat().st_ino
    staging.settle(RUN, True, False, lambda problem: None)

    path = Path(staging.make("exec_2"))

    assert (path, path.stat().st_ino) == (area.parent / "exec_2", inode)
    assert os.listdir(area.parent) == ["exec_2"]


def test_an_area_that_no_run_takes_over_is_removed(
    area: Path, staging: Staging, loop: Loop
) -> None:
    staging.settle(RUN, True, False, lambda problem: None)
    finish(loop)

    assert os.listdir(area.parent) == []
    assert Path(staging.make("exec_2")).is_dir()


@pytest.mark.parametrize("change", ["in use", "new permissions", "removed"])
def test_the_next_run_gets_a_new_area_otherwise(
    area: Path, staging: Staging, loop: Loop, change: str
) -> None:
    kept = os.open(area, os.O_RDONLY)  # So that no other directory gets its inode.
    if change == "new permissions":
        area.chmod(0o777)
    staging.settle(RUN, True, change == "in use", lambda problem: None)
    if change == "removed":
        area.rmdir()

    path = Path(staging.make("exec_2"))
    finish(loop)

    assert path.stat().st_ino != os.fstat(kept).st_ino
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert os.listdir(area.parent) == ["exec_2"]
    os.close(kept)


def test_staged_files_appear_when_the_run_succeeds(root: Path, area: Path, settle: Settle) -> None:
    put(root / "old", "old")
    put(root / "both" / "kept", "kept")
    put(root / "both" / "replaced", "old")
    for name in ("new", "both/replaced", "both/deep/er", "whole/tree/f"):
        put(area / name, name)

    assert settle(True) is None

    assert tree(root) == {
        "old": "old", "new": "new", "both/kept": "kept", "both/replaced": "both/replaced",
        "both/deep/er": "both/deep/er", "whole/tree/f": "whole/tree/f",
    }  # fmt: skip
    assert leftovers(root) == []


def test_staged_files_are_removed_when_the_run_fails(
    root: Path, area: Path, settle: Settle
) -> None:
    put(area / "a" / "b", "x")

    assert settle(False) is None

    assert tree(root) == {}
    assert leftovers(root) == []


@pytest.mark.parametrize("keep", [True, False])
def test_an_empty_staging_area_is_removed(
    root: Path, area: Path, settle: Settle, keep: bool
) -> None:
    assert settle(keep) is None
    assert leftovers(root) == []
    assert (root / STAGING).is_dir()


def test_a_conflict_keeps_all_staged_files_out(root: Path, area: Path, settle: Settle) -> None:
    put(root / "z" / "taken" / "f", "mine")
    put(area / "a", "a")
    put(area / "z" / "taken", "staged")

    problem = settle(True)

    assert problem is not None
    assert problem["code"] == "staging_conflict"
    assert "z/taken" in problem["message"]
    assert tree(root) == {"z/taken/f": "mine"}
    assert leftovers(root) == []


@pytest.mark.parametrize("there", ["file", "link"])
def test_a_directory_does_not_replace_another_kind_of_file(
    root: Path, area: Path, settle: Settle, there: str
) -> None:
    put(area / "name" / "f", "staged")
    if there == "file":
        put(root / "name", "mine")
    else:
        (root / "name").symlink_to("../outside")

    problem = settle(True)

    assert problem is not None
    assert problem["code"] == "staging_conflict"
    assert tree(root.parent / "outside") == {"f": "outside"}


def test_the_staging_area_cannot_be_staged(root: Path, area: Path, settle: Settle) -> None:
    put(area / ".tmp" / "exec_2" / "f", "x")

    problem = settle(True)

    assert problem is not None
    assert problem["code"] == "staging_conflict"


def test_links_and_pipes_are_moved_unchanged(root: Path, area: Path, settle: Settle) -> None:
    (area / "link").symlink_to("/etc/passwd")
    (area / "dangling").symlink_to("nowhere")
    os.mkfifo(area / "pipe")
    put(root / "link", "a file before")

    assert settle(True) is None

    assert os.readlink(root / "link") == "/etc/passwd"
    assert os.readlink(root / "dangling") == "nowhere"
    assert stat.S_ISFIFO((root / "pipe").stat().st_mode)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("which", ["parent", "area"])
def test_a_link_in_place_of_the_area_is_not_followed(
    root: Path, settle: Settle, keep: bool, which: str
) -> None:
    outside = root.parent / "outside"
    if which == "parent":
        (outside / RUN).mkdir()
        put(outside / RUN / "g", "x")
        (root / STAGING).symlink_to(outside)
    else:
        (root / STAGING).mkdir()
        (root / STAGING / RUN).symlink_to(outside)

    problem = settle(keep)

    assert (problem is not None) == (keep and which == "area")
    assert (outside / "f").read_text() == "outside"
    assert not (root / "f").exists()
    assert not (root / "g").exists()


def test_a_file_with_its_name_prevents_a_staging_area(
    root: Path, staging: Staging, settle: Settle
) -> None:
    put(root / STAGING, "mine")

    assert staging.make(RUN) == ""
    assert settle(True) is None
    assert (root / STAGING).read_text() == "mine"


def test_a_staging_area_behind_a_link_is_ignored(root: Path, staging: Staging) -> None:
    (root / STAGING).symlink_to(root.parent / "outside")

    assert staging.make(RUN) == ""
    assert os.listdir(root.parent / "outside") == ["f"]


@pytest.mark.parametrize("keep", [True, False])
def test_staged_files_without_permissions_are_moved(
    root: Path, area: Path, settle: Settle, keep: bool
) -> None:
    put(area / "closed" / "f", "x")
    put(root / "both" / "g", "g")
    put(area / "both" / "f", "x")
    for path in (area / "closed", area / "both", area, root / STAGING):
        path.chmod(0o000 if path.name == STAGING else 0o500)

    assert settle(keep) is None

    expected = {"both/g": "g"}
    if keep:
        expected |= {"closed/f": "x", "both/f": "x"}
        assert stat.S_IMODE((root / "closed").stat().st_mode) == 0o500
    assert tree(root) == expected


def test_the_event_loop_continues_while_ten_thousand_files_are_moved(
    root: Path, area: Path, staging: Staging, loop: Loop
) -> None:
    for number in range(10_000):
        (area / str(number)).touch()
    turns: list[int] = []
    problems: list[Problem | None] = []

    def turn() -> None:
        turns.append(len(problems))
        if not problems:
            loop.after(0.0, turn)

    staging.settle(RUN, True, False, problems.append)
    turn()
    finish(loop)

    assert problems == [None]
    assert len(turns) > 3
    assert len(os.listdir(root)) == 10_001
    assert leftovers(root) == []


@pytest.mark.parametrize("keep", [True, False])
def test_a_deep_tree_is_moved_or_removed(
    root: Path, area: Path, settle: Settle, keep: bool
) -> None:
    here = os.open(area, os.O_DIRECTORY)
    for _ in range(2000):
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)

    assert settle(keep) is None

    assert (root / "deep").is_dir() == keep
    assert not area.exists()
    if keep:
        Workspace(str(root)).remove("deep", recursive=True)


def test_trees_that_are_both_deep_are_not_merged(root: Path, area: Path, settle: Settle) -> None:
    name = "/".join(["d"] * (MAX_DEPTH + 1))
    put(root / name / "mine", "mine")
    put(area / name / "staged", "staged")

    problem = settle(True)

    assert problem is not None
    assert problem["code"] == "staging_failed"
    assert not (root / name / "staged").exists()


def test_leftovers_are_removed_at_the_start(root: Path, area: Path, loop: Loop) -> None:
    put(area / "a" / "f", "x")
    put(root / ".atoll-trash-1" / "0" / "f", "x")
    put(root / "kept", "kept")

    Staging(loop, str(root)).clear()
    finish(loop)

    assert [path.name for path in root.iterdir()] == ["kept"]


def test_a_file_in_place_of_the_staging_area_stays_at_the_start(root: Path, loop: Loop) -> None:
    put(root / STAGING, "mine")

    Staging(loop, str(root)).clear()

    assert (root / STAGING).read_text() == "mine"


def test_neither_lists_nor_artifacts_show_staged_files(root: Path, area: Path) -> None:
    put(area / "f", "x")
    put(root / "a" / ".tmp" / "f", "the user's own")

    workspace = Workspace(str(root))
    assert [entry["path"] for entry in workspace.list("", "", 10)["entries"]] == ["a"]
    assert [entry["path"] for entry in workspace.list("a", "", 10)["entries"]] == ["a/.tmp"]
    listed, _ = artifacts.ArtifactScanner(str(root)).changed_since(0, 10)
    assert [item["path"] for item in listed] == ["a/.tmp/f"]
