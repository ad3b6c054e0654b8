"""
What waits on this node's disk for a store that is away: objects to be put, and removals.

Several processes share the directory. `objects/` has a file per key, `removed/` one per removal,
`drafts/` what is being written, `used` what all of that takes. A change is made under `lock`, for
as long as a few system calls take; whoever moves things to the store has `turn` meanwhile, alone.
Both are locks of open files, so they end with their process. An object is forced to the disk before
it counts. A kill between a change and its note in `used` leaves that wrong until `recount`.

Everything here blocks.
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

from atoll.blobs import tree
from atoll.blobs.draft import BLOCK, Draft, blocks
from atoll.errors import BlobsUnavailable, SpoolFull

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime
    from pathlib import Path
    from typing import BinaryIO

    from atoll.blobs.base import BlobInfo

_PUT, _CREATE = 0o600, 0o400
"""The mode of an object's file says whether it may replace one that the store has by then."""


class Held(Enum):
    """What is known here of a key."""

    NOTHING = "nothing"
    OBJECT = "object"
    REMOVED = "removed"


class Used(NamedTuple):
    objects: int
    """Removals too."""
    size: int
    """Bytes, in whole blocks; drafts too."""


class Removal(NamedTuple):
    what: str
    """A key, or a prefix, which ends with `/`."""
    name: str
    version: tuple[int, int]
    age_from: float


class Waiting:
    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit
        self._objects = directory / "objects"
        self._removed = directory / "removed"
        self._drafts = directory / "drafts"

    # Looking

    def look(self, key: str) -> Held:
        if tree.info_of(self._objects, key) is not None:
            return Held.OBJECT
        return Held.REMOVED if self.covering(key) else Held.NOTHING

    def open(self, key: str) -> BinaryIO | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return open(self._objects / key, "rb")
        return None

    def objects(self, directory: str, after: str | None, limit: int) -> list[BlobInfo]:
        """The next objects beneath a directory, "" for all."""
        return list(itertools.islice(tree.walk(self._objects, directory, after), limit))

    def covering(self, key: str) -> list[Removal]:
        """Removals that are about this key."""
        names = key.split("/")
        prefixes = ["/".join(names[:count]) + "/" for count in range(1, len(names))]
        return [found for what in (key, *prefixes) if (found := self._removal(_name(what)))]

    def removals(self, after: str, limit: int) -> list[Removal]:
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
        return next(tree.walk(self._objects, ""), None) is not None

    def used(self) -> Used:
        try:
            objects, size = (self._directory / "used").read_text().split()
        except (FileNotFoundError, ValueError):
            return Used(0, 0)
        return Used(int(objects), int(size))

    def tick(self) -> datetime:
        """Now, by the clock that dates files."""
        with open(self._directory / "tick", "wb", opener=_private) as file:
            file.write(b"now")
            file.flush()
            return tree.described("tick", os.fstat(file.fileno())).modified_at

    # Changing

    def draft(self) -> Draft:
        with self._changing():
            path = self._drafts / secrets.token_hex(8)
            file = open(path, "xb", opener=_private)  # noqa: SIM115
            # Held as long as it is written, so that nobody takes it for a dead process's.
            fcntl.flock(file, fcntl.LOCK_EX)
        return Draft(self, path, file)

    def put(self, key: str, data: bytes, *, only_new: bool = False) -> bool:
        draft = self.draft()
        try:
            draft.reserve(len(data))
            draft.write(data)
            return draft.commit(key, only_new=only_new)
        finally:
            draft.drop()

    def remove(self, what: str) -> None:
        """Forget the object, or all beneath a prefix, and remember that the store is to do so."""
        name = _name(what)
        new, gone = self._drafts / f"{name}.new", self._drafts / f"{secrets.token_hex(8)}.gone"
        with self._changing() as used:
            there = self._objects / what.rstrip("/")
            objects, size = _weight(there)
            if (self._removed / name).exists():
                used.add(-objects, -size)
            else:
                used.add(1 - objects, BLOCK - size, limit=None if objects else self._limit)
            with open(new, "w", opener=_private) as file:
                file.write(what)
                file.flush()
                os.fsync(file.fileno())
            # First: a kill behind it leaves the object, as if the call had not been made.
            os.rename(new, self._removed / name)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.rename(there, gone)
                self._prune(there.parent)
        _sync(self._removed)
        if gone.is_dir():
            shutil.rmtree(gone, ignore_errors=True)
        else:
            gone.unlink(missing_ok=True)

    def done(self, removal: Removal) -> None:
        """Forget a removal, unless it was asked for again meanwhile."""
        with self._changing() as used:
            found = self._removal(removal.name)
            if found is not None and found.version == removal.version:
                (self._removed / removal.name).unlink()
                used.add(-1, -BLOCK)

    def uploaded(self, key: str, file: BinaryIO) -> None:
        """Forget an object, which is open, unless it was replaced or removed meanwhile."""
        path = self._objects / key
        with self._changing() as used:
            try:
                found = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            # While it is open its number cannot be another's.
            if os.path.samestat(found, os.fstat(file.fileno())):
                path.unlink()
                self._prune(path.parent)
                used.add(-1, -blocks(found.st_size))

    def recount(self) -> None:
        """Put `used` right, and remove what killed processes left half done."""
        with self._changing() as used:
            with os.scandir(self._drafts) as entries:
                for entry in entries:
                    _remove_dead(entry)
            objects, size = _weight(self._objects)
            removals = len(os.listdir(self._removed))
            used.now = Used(objects + removals, size + removals * BLOCK)
            used.add(0, _weight(self._drafts)[1])

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Whether this one, of all tasks of all processes, may move things to the store."""
        self._make()
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

    def take(self, draft: Path, key: str, size: int, reserved: int, *, only_new: bool) -> bool:
        path = self._objects / key
        with self._changing() as used:
            before = tree.info_of(self._objects, key)
            if before is not None and only_new:
                return False
            os.chmod(draft, _CREATE if only_new else _PUT)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.rename(draft, path)
            used.add(1, blocks(size) - reserved)
            if before is not None:
                used.add(-1, -blocks(before.size))
        for parent in itertools.takewhile(lambda one: one != self._directory, path.parents):
            with contextlib.suppress(FileNotFoundError):
                _sync(parent)
        return True

    def _removal(self, name: str) -> Removal | None:
        try:
            with open(self._removed / name) as file:
                found = os.fstat(file.fileno())
                version = (found.st_ino, found.st_mtime_ns)
                return Removal(file.read(), name, version, found.st_mtime)
        except FileNotFoundError:
            return None

    def _prune(self, directory: Path) -> None:
        """Remove directories that are empty now, so that the top is empty when nothing waits."""
        with contextlib.suppress(OSError):
            while directory != self._objects:
                directory.rmdir()
                directory = directory.parent

    def _make(self) -> None:
        for directory in (self._directory, self._objects, self._removed, self._drafts):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Account]:
        self._make()
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
    """What is used, as it is to be noted."""

    def __init__(self, now: Used) -> None:
        self.now = now

    def add(self, objects: int, size: int, *, limit: int | None = None) -> None:
        after = Used(max(0, self.now.objects + objects), max(0, self.now.size + size))
        if limit is not None and after.size > limit:
            raise SpoolFull(
                f"The blob store is away and {limit} bytes wait for it on this node, which is all "
                "that may. Try again when it is back.",
                retry_after=5.0,
            )
        self.now = after


@contextlib.contextmanager
def on_disk() -> Iterator[None]:
    """Failures of the disk, as the contract of blobs has them."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpoolFull(
                "The blob store is away and the disk of this node, where what waits for it is "
                "kept, is full.",
                retry_after=5.0,
            ) from error
        raise BlobsUnavailable(
            f"What waits on this node for the blob store cannot be reached: {error.strerror}",
        ) from error


def only_new(file: BinaryIO) -> bool:
    """Whether this object is not to replace one."""
    return os.fstat(file.fileno()).st_mode & 0o777 == _CREATE


def _name(what: str) -> str:
    # A key can be longer than a file's name.
    return hashlib.sha256(what.encode()).hexdigest()


def _weight(path: Path) -> tuple[int, int]:
    """Files, and bytes of these, at a path or beneath it."""
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
