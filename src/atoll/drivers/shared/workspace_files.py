"""
Where sessions' files are kept on this node.

With loop devices, which takes root, a workspace is a file system image of the size that was asked
for: bytes and inodes are limited by the kernel, for deleted and hidden files too. Otherwise it is a
directory, and the executor watches its size. A workspace has one host uid for good, so that
whichever instance takes it over owns its files, and no other workspace has it. In an image that was
copied files belong to the uid of the first one still; it is mounted such that they appear as the
copy's. Blocking file work; callers use a thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from atoll.drivers.shared import mount_calls, tree_copy
from atoll.drivers.shared.disk_images import (
    MIN_IMAGE,
    loop_device_of,
    make_file_system,
    mount_program,
    repair_image,
)
from atoll.drivers.shared.file_trees import remove_tree
from atoll.errors import TemporaryError
from atoll.executor.files import removal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from atoll.settings import LocalSettings

IMAGE, DIRECTORY, BUCKET = "image", "directory", "bucket"
DETACH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Workspace:
    name: str
    kind: str
    uid: int | None
    """Host uid that owns the files; none when Atoll's own does."""
    size: int
    """Bytes."""
    prefix: str | None = None
    """Where its files are in the bucket, when they are not here."""
    owner: int | None = None
    """In an image, the uid that its files have on disk; none when that is `uid`."""


class _NotMapped(Exception):
    """This host cannot mount an image with another owner than its files have."""


class WorkspaceFiles:
    def __init__(
        self,
        root: Path,
        settings: LocalSettings,
        *,
        images: bool,
        own_uids: bool,
    ) -> None:
        """With `own_uids` each workspace has a host uid of its own; else all have Atoll's."""
        self._root = root
        self._blank = root.parent / "blank"
        self._settings = settings
        self.images = images
        self._own_uids = own_uids
        self._maps: bool | None = None
        """Whether images can be mounted with another owner; none until that was tried."""

    def open(self) -> None:
        for directory in (self._root, self._blank):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, workspace: Workspace) -> Path:
        """The directory to bind, or the image to mount; none of one in the bucket."""
        assert workspace.kind != BUCKET
        return self._root / workspace.name / ("disk" if workspace.kind == IMAGE else "files")

    def journal(self, workspace: Workspace) -> tuple[Path, Path]:
        """
        Where the executor keeps results that nobody has taken: beside the files, so that the next
        instance has them too, and not among them, so that user code has not.
        """
        place = self._root / workspace.name
        return place / "journal.0", place / "journal.1"

    def make(self, name: str, size: int, prefix: str | None = None) -> Workspace:
        """A new, empty workspace; the one of that name when it is there."""
        place = self._root / name
        found = self.get(name)
        if found is not None:
            return found
        self.remove(name)
        kind = BUCKET if prefix is not None else IMAGE if self.images else DIRECTORY
        workspace = Workspace(name, kind, self.new_uid(), max(size, MIN_IMAGE), prefix)
        with self._whole(place, workspace):
            if workspace.kind == IMAGE:
                self.make_image(place / "disk", workspace.size)
            elif workspace.kind == DIRECTORY:
                directory = place / "files"
                directory.mkdir(mode=0o700)
                if workspace.uid is not None:
                    os.chown(directory, workspace.uid, workspace.uid)
        return workspace

    def copy(self, source: Workspace, name: str, abandoned: threading.Event) -> bool:
        """
        A workspace with the files of another, which nobody changes meanwhile; that of the name when
        it is there. What the executor keeps beside the files is not copied. False when it cannot be
        done; `copies.Abandoned` when it was given up.
        """
        if source.kind == BUCKET:
            return False
        if self.get(name) is not None:
            return True
        self.remove(name)
        place, uid = self._root / name, self.new_uid()
        owner = source.owner or source.uid
        owner = owner if source.kind == IMAGE and owner != uid else None
        workspace = Workspace(name, source.kind, uid, source.size, owner=owner)
        try:
            with self._whole(place, workspace):
                if source.kind == DIRECTORY:
                    self._copy_tree(self.path(source), place, uid, abandoned)
                else:
                    self._copy_image(self.path(source), place / "disk", workspace, abandoned)
        except _NotMapped:
            return False
        return True

    def _copy_image(
        self, source: Path, target: Path, workspace: Workspace, abandoned: threading.Event
    ) -> None:
        with source.open("rb") as file, target.open("xb") as copy:
            tree_copy.copy_content(file.fileno(), copy.fileno(), workspace.size, abandoned)
        if workspace.owner is not None and not self._can_map(target, workspace):
            raise _NotMapped

    @staticmethod
    def _copy_tree(source: Path, place: Path, uid: int | None, abandoned: threading.Event) -> None:
        target, links = place / "files", place / "links"
        with contextlib.ExitStack() as held:
            fds = []
            for directory in (source, target, links):
                if directory is not source:
                    directory.mkdir(mode=0o700)
                fds.append(os.open(directory, removal.DIRECTORY))
                held.callback(os.close, fds[-1])
            tree_copy.TreeCopy(fds[0], fds[1], uid, fds[2], abandoned).run()
        shutil.rmtree(links)

    def _can_map(self, image: Path, workspace: Workspace) -> bool:
        """Tried with the first image that needs it: kernels before 5.12 cannot."""
        if self._maps is None:
            users = (workspace.owner, workspace.uid)
            done = mount_program(mount_calls.TRY, image, image.parent, *users, timeout=60)
            self._wait_until_detached(image)
            self._maps = done.returncode == 0
        return self._maps

    @contextlib.contextmanager
    def _whole(self, place: Path, workspace: Workspace) -> Iterator[None]:
        """The making of a workspace, which is there when it is through and not before."""
        try:
            place.mkdir(mode=0o700)
            yield
            self._tell(place, workspace)
        except BaseException:
            self.remove(workspace.name)
            raise

    def update(self, workspace: Workspace) -> None:
        """Record what has become of one that is there."""
        self._tell(self._root / workspace.name, workspace)

    @staticmethod
    def _tell(place: Path, workspace: Workspace) -> None:
        # Last, whole or not at all: a workspace without it is the rest of an interrupted call.
        temporary = place / ".workspace.json"
        temporary.write_text(json.dumps(asdict(workspace)))
        temporary.replace(place / "workspace.json")

    def get(self, name: str) -> Workspace | None:
        try:
            return Workspace(**json.loads((self._root / name / "workspace.json").read_text()))
        except FileNotFoundError:
            return None

    def repair(self, workspace: Workspace) -> None:
        """
        Before an image is mounted again: its last instance may have died in the middle of a write.
        """
        if workspace.kind != IMAGE:
            return
        self._wait_until_detached(self.path(workspace))
        repair_image(self.path(workspace))

    def wait_until_unmounted(self, workspace: Workspace) -> None:
        """Until nothing of an instance that has ended writes to it any more."""
        if workspace.kind == IMAGE:
            self._wait_until_detached(self.path(workspace))

    @staticmethod
    def _wait_until_detached(image: Path) -> None:
        """
        The kernel unmounts an image some time after the last process of its instance has ended; to
        mount it a second time before that would damage it.
        """
        deadline = time.monotonic() + DETACH_SECONDS
        while loop_device_of(image) is not None:
            if time.monotonic() > deadline:
                raise TemporaryError(
                    f"Workspace image {image} is still mounted.", code="workspace_busy"
                )
            time.sleep(0.002)

    def remove(self, name: str) -> None:
        remove_tree(self._root / name)

    def names(self) -> list[str]:
        return sorted(entry.name for entry in os.scandir(self._root))

    def new_uid(self) -> int | None:
        if not self._own_uids:
            return None
        return self._settings.uid_base + secrets.randbelow(self._settings.uid_count)

    def directory(self, name: str) -> Path:
        """Where all of a workspace is."""
        return self._root / name

    def make_image(self, target: Path, size: int) -> None:
        """A new file system by copying the written parts of an empty one: faster than making it."""
        blank = self._blank / str(size)
        if not blank.exists():
            self._make_blank(size, blank)
        with blank.open("rb") as source, target.open("xb") as copy:
            tree_copy.copy_content(source.fileno(), copy.fileno(), size, threading.Event())

    def _make_blank(self, size: int, blank: Path) -> None:
        temporary = blank.with_name(f".{blank.name}.{secrets.token_hex(4)}")
        try:
            make_file_system(temporary, size)
            temporary.replace(blank)
        finally:
            temporary.unlink(missing_ok=True)
