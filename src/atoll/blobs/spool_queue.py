"""
The objects and removals that wait on this node's disk for an unavailable store.

Several processes share the directory. `objects/` has a file per key, `removed/` one per removal,
`drafts/` the files being written, and `used` the space that all of them take. A change holds `lock`
for a few system calls; the one process that uploads holds `turn`. Both are file locks, so they end
with their process. An object is synced to disk before it counts. A kill between a change and the
update of `used` leaves `used` wrong until `recount`.

Every method blocks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import secrets
import shutil
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from atoll.blobs import local_listing
from atoll.blobs.spool_writer import BLOCK, SpoolWriter, blocks
from atoll.errors import BlobsUnavailable, SpoolFull

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime
    from pathlib import Path
    from typing import BinaryIO

    from atoll.blobs.base import BlobInfo

_PUT, _CREATE = 0o600, 0o400
"""File modes: whether an object may replace one that the store has by the time of the upload."""


class SpoolState(Enum):
    """What the spool holds for a key."""

    NOTHING = "nothing"
    OBJECT = "object"
    REMOVED = "removed"


class SpoolUsage(NamedTuple):
    objects: int
    """Includes removals."""
    size: int
    """Bytes in full blocks, including unfinished writes."""


class PendingRemoval(NamedTuple):
    what: str
    """A key, or a prefix, which ends with `/`."""
    name: str
    version: tuple[int, int]
    requested_at: float


class SpoolQueue:
    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit
        self._objects = directory / "objects"
        self._removed = directory / "removed"
        self._drafts = directory / "drafts"

    # Reading

    def state_of(self, key: str) -> SpoolState:
        if local_listing.info_of(self._objects, key) is not None:
            return SpoolState.OBJECT
        return SpoolState.REMOVED if self.removals_of(key) else SpoolState.NOTHING

    def open(self, key: str) -> BinaryIO | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return open(self._objects / key, "rb")
        return None

    def objects(self, directory: str, after: str | None, limit: int) -> list[BlobInfo]:
        """The next objects beneath a directory, "" for all."""
        return list(itertools.islice(local_listing.walk(self._objects, directory, after), limit))

    def removals_of(self, key: str) -> list[PendingRemoval]:
        """Pending removals that include this key."""
        names = key.split("/")
        prefixes = ["/".join(names[:count]) + "/" for count in range(1, len(names))]
        return [found for what in (key, *prefixes) if (found := self._removal(_name(what)))]

    def removals(self, after: str, limit: int) -> list[PendingRemoval]:
        """The next ones in the order of their names."""
        try:
            names = sorted(name for name in os.listdir(self._removed) if name > after)
        except FileNotFoundError:
            return []
        return [found for name in names[:limit] if (found := self._removal(name))]

    def any_removals(self) -> bool:
        try:
            with os.scandir(self._removed) as entries:
                return next(entries, None) is not None
        except FileNotFoundError:
            return False

    def any_objects(self) -> bool:
        return next(local_listing.walk(self._objects, ""), None) is not None

    def used(self) -> SpoolUsage:
        try:
            objects, size = (self._directory / "used").read_text().split()
        except (FileNotFoundError, ValueError):
            return SpoolUsage(0, 0)
        return SpoolUsage(int(objects), int(size))

    def file_time(self) -> datetime:
        """The current time by the clock of file timestamps."""
        with open(self._directory / "tick", "wb", opener=_private) as file:
            file.write(b"now")
            file.flush()
            return local_listing.describe("tick", os.fstat(file.fileno())).modified_at

    # Writing

    def writer(self) -> SpoolWriter:
        with self._changing():
            path = self._drafts / secrets.token_hex(8)
            file = open(path, "xb", opener=_private)  # noqa: SIM115
            # Locked while it is written, so that no process considers it abandoned.
            fcntl.flock(file, fcntl.LOCK_EX)
        return SpoolWriter(self, path, file)

    def put(self, key: str, data: bytes, *, create: bool = False) -> bool:
        writer = self.writer()
        try:
            writer.reserve(len(data))
            writer.write(data)
            return writer.commit(key, create=create)
        finally:
            writer.drop()

    def remove(self, what: str) -> None:
        """Remove the object, or all beneath a prefix, and record that the store must do so too."""
        name = _name(what)
        new, gone = self._drafts / f"{name}.new", self._drafts / f"{secrets.token_hex(8)}.gone"
        with self._changing() as used:
            there = self._objects / what.rstrip("/")
            objects, size = _usage_of(there)
            if (self._removed / name).exists():
                used.add(-objects, -size)
            else:
                used.add(1 - objects, BLOCK - size, limit=None if objects else self._limit)
            with open(new, "w", opener=_private) as file:
                file.write(what)
                file.flush()
                os.fsync(file.fileno())
            # First: a kill after this line leaves the object, as if the call had not been made.
            os.rename(new, self._removed / name)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.rename(there, gone)
                self._prune(there.parent)
        _sync(self._removed)
        if gone.is_dir():
            shutil.rmtree(gone, ignore_errors=True)
        else:
            gone.unlink(missing_ok=True)

    def forget_removal(self, removal: PendingRemoval) -> None:
        """Drop a removal that was applied, unless it was requested again meanwhile."""
        with self._changing() as used:
            found = self._removal(removal.name)
            if found is not None and found.version == removal.version:
                (self._removed / removal.name).unlink()
                used.add(-1, -BLOCK)

    def forget_object(self, key: str, file: BinaryIO) -> None:
        """Drop an uploaded object, open as `file`, unless it was replaced or removed meanwhile."""
        path = self._objects / key
        with self._changing() as used:
            try:
                found = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            # Its inode number cannot be reused while it is open.
            if os.path.samestat(found, os.fstat(file.fileno())):
                path.unlink()
                self._prune(path.parent)
                used.add(-1, -blocks(found.st_size))

    def recount(self) -> None:
        """Correct `used`, and remove the unfinished writes of killed processes."""
        with self._changing() as used:
            with os.scandir(self._drafts) as entries:
                for entry in entries:
                    _remove_dead(entry)
            objects, size = _usage_of(self._objects)
            removals = len(os.listdir(self._removed))
            used.now = SpoolUsage(objects + removals, size + removals * BLOCK)
            used.add(0, _usage_of(self._drafts)[1])

    @contextlib.contextmanager
    def upload_lock(self) -> Iterator[bool]:
        """Whether the caller is the one task, of all processes, that may upload."""
        self._make_directories()
        with open(self._directory / "turn", "wb", opener=_private) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def reserve(self, size: int) -> None:
        with self._changing() as used:
            used.add(0, size, limit=self._limit if size > 0 else None)

    def commit(self, writer: Path, key: str, size: int, reserved: int, *, create: bool) -> bool:
        path = self._objects / key
        with self._changing() as used:
            before = local_listing.info_of(self._objects, key)
            if before is not None and create:
                return False
            os.chmod(writer, _CREATE if create else _PUT)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.rename(writer, path)
            used.add(1, blocks(size) - reserved)
            if before is not None:
                used.add(-1, -blocks(before.size))
        for parent in itertools.takewhile(lambda one: one != self._directory, path.parents):
            with contextlib.suppress(FileNotFoundError):
                _sync(parent)
        return True

    def _removal(self, name: str) -> PendingRemoval | None:
        try:
            with open(self._removed / name) as file:
                found = os.fstat(file.fileno())
                version = (found.st_ino, found.st_mtime_ns)
                return PendingRemoval(file.read(), name, version, found.st_mtime)
        except FileNotFoundError:
            return None

    def _prune(self, directory: Path) -> None:
        """Remove empty directories, so that the top is empty if nothing waits."""
        with contextlib.suppress(OSError):
            while directory != self._objects:
                directory.rmdir()
                directory = directory.parent

    def _make_directories(self) -> None:
        for directory in (self._directory, self._objects, self._removed, self._drafts):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Account]:
        self._make_directories()
        with open(self._directory / "lock", "wb", opener=_private) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            account = _Account(self.used())
            before = account.now
            try:
                yield account
            finally:
                if account.now != before:
                    new = self._drafts / "used.new"
                    new.write_text(f"{account.now.objects} {account.now.size}")
                    os.rename(new, self._directory / "used")


class _Account:
    """The value of `used` to be written."""

    def __init__(self, now: SpoolUsage) -> None:
        self.now = now

    def add(self, objects: int, size: int, *, limit: int | None = None) -> None:
        after = SpoolUsage(max(0, self.now.objects + objects), max(0, self.now.size + size))
        if limit is not None and after.size > limit:
            raise SpoolFull(
                f"The blob store is unavailable and this node's spool of {limit} bytes is full. "
                "Retry when the store is back.",
                retry_after=5.0,
            )
        self.now = after


@contextlib.contextmanager
def on_disk() -> Iterator[None]:
    """Translate disk failures into the exceptions of the blob contract."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpoolFull(
                "The blob store is unavailable, and the disk of this node, which holds its spool, "
                "is full.",
                retry_after=5.0,
            ) from error
        raise BlobsUnavailable(
            f"The spool of this node cannot be used: {error.strerror}",
        ) from error


def is_create(file: BinaryIO) -> bool:
    """Whether the object must not replace an existing one."""
    return os.fstat(file.fileno()).st_mode & 0o777 == _CREATE


def _name(what: str) -> str:
    # A key can be longer than a file's name.
    return hashlib.sha256(what.encode()).hexdigest()


def _usage_of(path: Path) -> tuple[int, int]:
    """Files, and their bytes, at a path or beneath it."""
    if path.is_file():
        return 1, blocks(path.stat().st_size)
    objects = size = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += blocks(os.lstat(os.path.join(directory, name)).st_size)
                objects += 1
    return objects, size


def _remove_dead(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path, ignore_errors=True)
        return
    with contextlib.suppress(FileNotFoundError), open(entry.path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        os.unlink(entry.path)


def _sync(directory: Path) -> None:
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
