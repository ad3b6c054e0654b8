"""
The data directories of this machine's servers, and whether a server uses them.

A server writes a note of its data directory to the user's state directory. The note outlives the
data directory, so `atoll gc` can find what is left of one that was removed. As long as it lives, a
server holds a shared lock on the note and on a file in the data directory. A process that gets an
exclusive lock on both knows that no server is running, and new servers wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK_FILE = "servers"
"""In the data directory. Without it the directory counts as removed."""
NODE_DIRECTORY = "node"
"""The driver's directory in the data directory."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Note:
    data_dir: Path
    docker_url: str | None = None
    """URL of the Docker engine, if the node has one."""
    docker_node: str | None = None
    """The label of its containers."""

    @property
    def is_removed(self) -> bool:
        """Whether the data directory is gone; False if that cannot be determined."""
        try:
            os.stat(self.data_dir / LOCK_FILE)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return False


def _notes() -> Path | None:
    """The directory of all notes; None for a user without a home."""
    base = os.environ.get("XDG_STATE_HOME")
    try:
        state = Path(base) if base else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return state / "atoll" / "nodes"


def _note_file(data_dir: Path) -> Path | None:
    notes = _notes()
    if notes is None:
        return None
    return notes / hashlib.sha256(str(data_dir.resolve()).encode()).hexdigest()[:16]


def lock_files(data_dir: Path) -> list[Path]:
    note = _note_file(data_dir)
    return [data_dir / LOCK_FILE, *([] if note is None else [note])]


class ServerLock:
    """The locks of a server on its data directory, held as long as it lives."""

    def __init__(self, data_dir: Path, *, temporary: bool) -> None:
        """A `temporary` data directory is removed when the server ends."""
        self._temporary = temporary
        self._note = _note_file(data_dir)
        self._locks = [_lock(data_dir / LOCK_FILE)]
        if self._note is None:
            return
        try:
            self._note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._locks.append(_lock(self._note))
            if os.fstat(self._locks[1]).st_size == 0:
                _write(self._locks[1], Note(data_dir.resolve()))
        except OSError as error:
            # As in a container with a read-only home: `atoll gc` does not find this directory.
            log.info("node.not_noted", path=str(self._note), error=str(error))

    def close(self) -> None:
        if self._temporary and self._note is not None and len(self._locks) > 1:
            self._note.unlink(missing_ok=True)
        for fd in self._locks:
            os.close(fd)


def _lock(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:
            pass  # Removed while this waited for the lock.
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _write(fd: int, note: Note) -> None:
    text = json.dumps(
        {
            "data_dir": str(note.data_dir),
            "docker_url": note.docker_url,
            "docker_node": note.docker_node,
        }
    ).encode()
    os.pwrite(fd, text, 0)
    os.ftruncate(fd, len(text))


def note_engine(data_dir: Path, url: str, name: str) -> None:
    """Add to the note how to find the containers of this node."""
    path = _note_file(data_dir)
    if path is None:
        return
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _write(fd, Note(data_dir.resolve(), url, name))
        finally:
            os.close(fd)


def known() -> list[Note]:
    """All data directories with a note, in order of their paths."""
    found = []
    notes = _notes()
    with contextlib.suppress(FileNotFoundError):
        for path in () if notes is None else notes.iterdir():
            try:
                fields = json.loads(path.read_text())
                found.append(Note(**{**fields, "data_dir": Path(fields["data_dir"])}))
            except (OSError, ValueError, TypeError, KeyError) as error:
                log.info("node.note_unreadable", path=str(path), error=repr(error))
    return sorted(found, key=lambda note: note.data_dir)


@contextlib.contextmanager
def removed(note: Note, *, forget: bool) -> Iterator[bool]:
    """
    Whether the data directory is gone and no server uses it. Servers that start wait until the
    block ends. With `forget`, the note of a removed directory is deleted then, unless an error was
    raised.
    """
    path = _note_file(note.data_dir)
    try:
        fd = -1 if path is None else os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        fd = -1
    if path is None or fd < 0:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        gone = note.is_removed
        yield gone
        if gone and forget:
            path.unlink(missing_ok=True)
    finally:
        os.close(fd)
