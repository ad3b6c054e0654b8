"""
Files of workspaces on this node.

With loop devices, which take root, a workspace is a file system image of the requested size: the
kernel limits bytes and inodes, deleted and hidden files included. Otherwise it is a directory whose
size the executor watches. A workspace keeps one host uid, which no other workspace has, so every
instance of it owns its files. In a copy of an image, files still have the uid of the original; it
is mounted such that they appear with the copy's. Blocking file work; callers use a thread.
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
    """Host uid that owns the files; Atoll's own if not set."""
    size: int
    """Bytes."""
    prefix: str | None = None
    """The prefix of its files, if they are in the bucket."""
    owner: int | None = None
    """The uid that files have in the image, if that is not `uid`."""


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
        """With `own_uids`, each workspace gets a host uid of its own."""
        self._root = root
        self._blank = root.parent / "blank"
        self._settings = settings
        self.images = images
        self._own_uids = own_uids
        self._maps: bool | None = None
        """Whether images can be mounted with another owner; None until that was tried."""

    def open(self) -> None:
        for directory in (self._root, self._blank):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, workspace: Workspace) -> Path:
        """The directory to bind, or the image to mount; not for workspaces in the bucket."""
        assert workspace.kind != BUCKET
        return self._root / workspace.name / ("disk" if workspace.kind == IMAGE else "files")

    def journal(self, workspace: Workspace) -> tuple[Path, Path]:
        """
        The executor's journal: beside the files, where the next instance finds it and user code
        cannot reach it.
        """
        place = self._root / workspace.name
        return place / "journal.0", place / "journal.1"

    def make(self, name: str, size: int, prefix: str | None = None) -> Workspace:
        """Make an empty workspace; return the existing one of that name if there is one."""
        place = self._root / name
        found = self.get(name)
        if found is not None:
            return found
        self.remove(name)
        kind = BUCKET if prefix is not None else IMAGE if self.images else DIRECTORY
        workspace = Workspace(name, kind, self.new_uid(), max(size, MIN_IMAGE), prefix)
        with self._making(place, workspace):
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
        Make a workspace with the files of another, which must not change meanwhile, unless it
        exists. The journal is not copied. False if this node cannot do it; `tree_copy.Abandoned`
        if `abandoned` was set.
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
            with self._making(place, workspace):
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
        """Tried with the first image that needs it: Linux before 5.12 cannot."""
        if self._maps is None:
            users = (workspace.owner, workspace.uid)
            done = mount_program(mount_calls.TRY, image, image.parent, *users, timeout=60)
            self._wait_until_detached(image)
            self._maps = done.returncode == 0
        return self._maps

    @contextlib.contextmanager
    def _making(self, place: Path, workspace: Workspace) -> Iterator[None]:
        """Record the workspace at the end of the block; remove it if the block fails."""
        try:
            place.mkdir(mode=0o700)
            yield
            self._record(place, workspace)
        except BaseException:
            self.remove(workspace.name)
            raise

    def update(self, workspace: Workspace) -> None:
        """Replace the record of an existing workspace."""
        self._record(self._root / workspace.name, workspace)

    @staticmethod
    def _record(place: Path, workspace: Workspace) -> None:
        # Written last and atomically: a workspace without a record remains from an interrupted
        # call.
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
        Check an image before it is mounted again: its last instance may have died in a write.
        """
        if workspace.kind != IMAGE:
            return
        self._wait_until_detached(self.path(workspace))
        repair_image(self.path(workspace))

    def wait_until_unmounted(self, workspace: Workspace) -> None:
        """Wait until the kernel has unmounted it after the end of its instance."""
        if workspace.kind == IMAGE:
            self._wait_until_detached(self.path(workspace))

    @staticmethod
    def _wait_until_detached(image: Path) -> None:
        """
        The kernel unmounts an image some time after the last process of its instance has ended. A
        second mount before that would damage it.
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
        """The directory of the workspace's files and records."""
        return self._root / name

    def make_image(self, target: Path, size: int) -> None:
        """Make a file system by copying an empty one, which is faster than mkfs."""
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
