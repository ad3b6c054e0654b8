"""
The directories that Atoll works in: made, locked, and given to one database.

A data directory is a node: its instances and workspaces belong to the sessions of one database, and
replicas that share it see each other's. Whoever is alone on it may clear away what nobody owns.
Without Redis there can be one server on it; with Redis several, and the lock tells whether there is
another.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from typing import TYPE_CHECKING

import structlog

from atoll.drivers.local import host_checks
from atoll.drivers.shared.data_directories import NODE_DIRECTORY
from atoll.drivers.shared.file_trees import remove_tree
from atoll.drivers.shared.mount_points import unmount_all
from atoll.errors import Conflict, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from atoll.settings import LocalSettings

LOCK_FILE = "lock"
CLUSTER_FILE = "cluster"
NODE_FILE = "node-id"
LOCAL = "local"
INSIDE, OUTSIDE = "inside", "elsewhere"
"""Where the database is that a data directory belongs to."""
UNLOCKED = ".new-"
"""How the name of an embedded Atoll's directory begins until it is locked."""
CLEARING_SECONDS = 60.0
"""How long another replica may take to clear the node after its start."""

log = structlog.get_logger(__name__)


def make_data_dir(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)


class DataDirLock:
    """Held as long as the process lives; alone at first if nobody else is there."""

    def __init__(self, data_dir: Path, *, shared: bool) -> None:
        self._data_dir = data_dir
        self._shared = shared
        self._file = os.open(data_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.alone = False
        try:
            self.alone = self._try(fcntl.LOCK_EX)
            if not self.alone:
                self._join()
        except BaseException:
            self.close()
            raise

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _join(self) -> None:
        """Beside others; one that was there first may be alone for a while yet."""
        deadline = time.monotonic() + CLEARING_SECONDS
        if self._shared and not self._try(fcntl.LOCK_SH):
            log.warning("data_dir.waits", path=str(self._data_dir), at_most=CLEARING_SECONDS)
        while not (self._shared and self._try(fcntl.LOCK_SH)):
            if not self._shared or time.monotonic() > deadline:
                raise Conflict(
                    f"Another server uses {self._data_dir}. Stop it, or give --data-dir another "
                    "directory; with ATOLL_REDIS_URL set for all of them, several can share one.",
                    code="data_dir_in_use",
                )
            time.sleep(0.05)

    def let_others_in(self) -> None:
        """What only one may do is done."""
        if self._shared and self.alone:
            fcntl.flock(self._file, fcntl.LOCK_SH)
            self.alone = False

    def close(self) -> None:
        os.close(self._file)


def give_to(data_dir: Path, cluster: str, *, own: bool) -> None:
    """
    Make the directory that of one database, and refuse it to any other: what runs there would be
    nobody's, and be removed. `own` says that the database is a file in the directory itself; one
    that is new there takes the place of one that somebody removed.
    """
    path = data_dir / CLUSTER_FILE
    wanted = f"{cluster} {INSIDE if own else OUTSIDE}"
    try:
        found = path.read_text().strip()
    except FileNotFoundError:
        found = None
    if found == wanted:
        return
    if found is not None and not (own and found.endswith(INSIDE)):
        raise Conflict(
            f"{data_dir} belongs to another database ({found}; this one is {wanted}). Set "
            "ATOLL_DATABASE_URL to that one, or give --data-dir another directory. To give up "
            f"the sessions that are in it, remove {path}.",
            code="data_dir_of_other_database",
        )
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(f"{wanted}\n")
    temporary.replace(path)


def node_id(data_dir: Path, *, own: bool) -> str:
    """
    What the node is called: a name of its own where several can meet in one database, kept in the
    directory.
    """
    if own:
        return LOCAL
    path = data_dir / NODE_FILE
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(f"{LOCAL}-{secrets.token_hex(4)}\n")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)  # Unlike a rename, it never replaces what another start has read.
    temporary.unlink()
    return path.read_text().strip()


# Embedded


@contextlib.contextmanager
def _held(path: Path, lock: int) -> Iterator[Path]:
    try:
        yield path
    finally:
        os.close(lock)


def own_directory(base: Path, local: LocalSettings) -> contextlib.AbstractContextManager[Path]:
    """
    A new directory, locked as long as this process has it; those of dead processes are removed.
    """
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    for other in base.iterdir():
        if not other.name.startswith(UNLOCKED):
            _remove_if_dead(other, local)
    name = secrets.token_hex(8)
    # Under a name that others leave alone until it is locked: they would take it for a dead one's.
    unlocked = base / f"{UNLOCKED}{name}"
    unlocked.mkdir(mode=0o700)
    lock = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return _held(unlocked.rename(base / name), lock)


def _remove_if_dead(place: Path, local: LocalSettings) -> None:
    try:
        lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # Its owner was quicker.
    except OSError as error:
        log.warning("embedded.not_removed", path=str(place), error=str(error))
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        host_checks.remove_leftovers(local, place / NODE_DIRECTORY)
        remove(place)
    except BlockingIOError:
        pass  # Somebody has it.
    except OSError as error:
        log.warning("embedded.not_removed", path=str(place), error=str(error))
    finally:
        os.close(lock)


def remove(place: Path) -> None:
    try:
        # Others' files, which must not go with the directory that they are mounted in.
        unmount_all(place)
        remove_tree(place)
    except (OSError, TemporaryError) as error:
        log.warning("embedded.not_removed", path=str(place), error=str(error))
