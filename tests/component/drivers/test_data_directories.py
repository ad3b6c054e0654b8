"""Notes about data directories, and their locks."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from atoll.drivers.local.orphaned_instances import unserved
from atoll.drivers.shared import data_directories
from atoll.drivers.shared.data_directories import Note, ServerLock


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    return directory


def served(data_dir: Path) -> bool:
    with unserved([str(path) for path in data_directories.lock_files(data_dir)]) as alone:
        return not alone


def is_removed(note: Note, *, forget: bool = True) -> bool:
    with data_directories.removed(note, forget=forget) as gone:
        return gone


def test_a_data_directory_is_in_use_while_any_server_holds_its_lock(data_dir: Path) -> None:
    first, second = (ServerLock(data_dir, temporary=False) for _ in range(2))
    assert data_directories.known() == [Note(data_dir)]
    first.close()
    assert served(data_dir)
    second.close()
    assert not served(data_dir)
    assert data_directories.known() == [Note(data_dir)]


def test_a_directory_without_lock_file_and_server_counts_as_removed(data_dir: Path) -> None:
    presence = ServerLock(data_dir, temporary=False)
    (data_dir / data_directories.LOCK_FILE).unlink()
    assert not is_removed(Note(data_dir)), "its server lives"
    presence.close()
    assert is_removed(Note(data_dir), forget=False)
    assert data_directories.known() == [Note(data_dir)]
    assert is_removed(Note(data_dir))
    assert data_directories.known() == []


def test_a_note_stays_when_leftovers_could_not_be_removed(data_dir: Path) -> None:
    ServerLock(data_dir, temporary=False).close()
    (data_dir / data_directories.LOCK_FILE).unlink()
    with suppress(OSError), data_directories.removed(Note(data_dir), forget=True):
        raise OSError("busy")
    assert data_directories.known() == [Note(data_dir)]


def test_the_note_stores_the_engine(data_dir: Path) -> None:
    presence = ServerLock(data_dir, temporary=False)
    data_directories.note_engine(data_dir, "unix:///run/docker.sock", "0123")
    presence.close()
    ServerLock(data_dir, temporary=False).close()
    assert data_directories.known() == [Note(data_dir, "unix:///run/docker.sock", "0123")]


def test_a_lock_file_that_cannot_be_opened_counts_as_locked(data_dir: Path) -> None:
    (data_dir / data_directories.LOCK_FILE).symlink_to(data_directories.LOCK_FILE)
    assert served(data_dir)


def test_a_temporary_lock_leaves_no_note(data_dir: Path) -> None:
    ServerLock(data_dir, temporary=True).close()
    assert data_directories.known() == []


def test_an_unreadable_note_is_skipped(data_dir: Path, state: Path) -> None:
    ServerLock(data_dir, temporary=False).close()
    (state / "atoll" / "nodes" / "other").write_text("{")
    assert data_directories.known() == [Note(data_dir)]


def test_a_server_starts_without_a_directory_for_notes(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    presence = ServerLock(data_dir, temporary=True)
    data_directories.note_engine(data_dir, "unix:///run/docker.sock", "0123")
    assert served(data_dir)
    assert data_directories.known() == []
    assert not is_removed(Note(data_dir))
    presence.close()

    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    ServerLock(data_dir, temporary=True).close()
