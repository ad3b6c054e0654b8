"""
Creates and locks data directories, and assigns each to one database.

A data directory is a node: its instances and workspaces belong to the sessions of one database, and
the replicas that share it see each other's. A replica that is alone on it may remove orphans.
Without Redis only one server may use it; with Redis several, and the lock shows whether another one
does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from typing import TYPE_CHECKING

import structlog

from atoll.drivers.local import leftovers
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
"""Whether the database is a file in the data directory or elsewhere."""
UNLOCKED = ".new-"
"""Name prefix of an embedded Atoll's directory until it is locked."""
RECOVERY_TIMEOUT = 60.0
"""Seconds that another replica may take to clean up the node at its start."""

log = structlog.get_logger(__name__)


def make_data_dir(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)


class DataDirLock:
    """Held until the process ends; exclusive at first if no other process holds it."""

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
        """Share the lock; a replica that is starting may hold it exclusively for a while."""
        deadline = time.monotonic() + RECOVERY_TIMEOUT
        if self._shared and not self._try(fcntl.LOCK_SH):
            log.warning("data_dir.waits", path=str(self._data_dir), at_most=RECOVERY_TIMEOUT)
        while not (self._shared and self._try(fcntl.LOCK_SH)):
            if not self._shared or time.monotonic() > deadline:
                raise Conflict(
                    f"Another server uses {self._data_dir}. Stop it, or choose another --data-dir. "
                    "Several servers can share a directory if ATOLL_REDIS_URL is set for all.",
                    code="data_dir_in_use",
                )
            time.sleep(0.05)

    def let_others_in(self) -> None:
        """Release exclusivity when the cleanup is done."""
        if self._shared and self.alone:
            fcntl.flock(self._file, fcntl.LOCK_SH)
            self.alone = False

    def close(self) -> None:
        os.close(self._file)


def assign_to(data_dir: Path, cluster: str, *, own: bool) -> None:
    """
    Assign the directory to a database, and refuse any other: it would remove the sessions in the
    directory as orphans. `own`: the database is a file in the directory itself; a new file there
    replaces one that was deleted.
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
            "ATOLL_DATABASE_URL to that database, or choose another --data-dir. To discard the "
            f"sessions in the directory, delete {path}.",
            code="data_dir_of_other_database",
        )
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(f"{wanted}\n")
    temporary.replace(path)


def node_id(data_dir: Path, *, own: bool) -> str:
    """
    The node's name: unique, and stored in the directory, if several nodes may share the database.
    """
    if own:
        return LOCAL
    path = data_dir / NODE_FILE
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(f"{LOCAL}-{secrets.token_hex(4)}\n")
    with contextlib.suppress(FileExistsError):
        # Unlike a rename, a link never replaces a name that another process has read.
        os.link(temporary, path)
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
    A new directory, locked until it is closed. Directories of dead processes are removed.
    """
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    for other in base.iterdir():
        if not other.name.startswith(UNLOCKED):
            _remove_if_dead(other, local)
    name = secrets.token_hex(8)
    # Other processes skip this name until the directory is locked; else they would remove it.
    unlocked = base / f"{UNLOCKED}{name}"
    unlocked.mkdir(mode=0o700)
    lock = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return _held(unlocked.rename(base / name), lock)


def _remove_if_dead(place: Path, local: LocalSettings) -> None:
    try:
        lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # Its owner has removed it.
    except OSError as error:
        log.warning("embedded.not_removed", path=str(place), error=str(error))
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        leftovers.remove_groups(local, place / NODE_DIRECTORY)
        remove(place)
    except BlockingIOError:
        pass  # It is in use.
    except OSError as error:
        log.warning("embedded.not_removed", path=str(place), error=str(error))
    finally:
        os.close(lock)


def remove(place: Path) -> None:
    try:
        # First: files of volumes must not be removed with the directory they are mounted in.
        unmount_all(place)
        remove_tree(place)
    except (OSError, TemporaryError) as error:
        log.warning("embedded.not_removed", path=str(place), error=str(error))
