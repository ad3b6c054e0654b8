"""
Socket and journal of a container's executor, in directories of this machine.

Code of the image runs before the executor can be reached: its interpreter, and modules that the
template preloads. Therefore both directories belong to the container's user first. Once the
executor has opened its files, and before any user code runs, `seal` gives them to root.

If file system images can be mounted, both directories are in a small image beside the workspace, so
that a hostile image cannot fill the disk. Blocking file system work; callers use a thread.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from typing import TYPE_CHECKING

from atoll.drivers.shared import tree_copy
from atoll.drivers.shared.file_trees import remove_tree
from atoll.drivers.shared.volumes.mounts import Mount
from atoll.protocol.limits import JOURNAL_FILE_SIZE

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.drivers.shared.volumes.node_volumes import NodeVolumes
    from atoll.drivers.shared.workspace_files import Workspace, WorkspaceFiles

IMAGE_FILE = "executor"
"""The file system image, beside the workspace."""
IMAGE_SIZE = 2 * JOURNAL_FILE_SIZE + 16 * 1024 * 1024
_JOURNAL_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ExecutorFiles:
    def __init__(
        self, instances: Path, workspaces: WorkspaceFiles, volumes: NodeVolumes, *, images: bool
    ) -> None:
        """`instances` has a directory for each instance."""
        self._instances = instances
        self._workspaces = workspaces
        self._volumes = volumes
        self._images = images

    def socket_directory(self, instance_id: str) -> Path:
        return self._instances / instance_id / "link"

    def mount(self, workspace: Workspace) -> Mount | None:
        """The image to mount for an instance with this workspace; null if images cannot be used."""
        if not self._images:
            return None
        path = self._workspaces.directory(workspace.name) / IMAGE_FILE
        is_new = not path.exists()
        if is_new:
            part = path.with_suffix(".new")
            part.unlink(missing_ok=True)
            self._workspaces.make_image(part, IMAGE_SIZE)
            part.rename(path)
        return Mount(_mount_name(workspace), image=path, new=is_new)

    def prepare(self, instance_id: str, workspace: Workspace, uid: int) -> tuple[Path, Path]:
        """Make the directories of socket and journal for `uid`; the image is mounted."""
        link = self.socket_directory(instance_id)
        journal = self._journal(workspace, in_image=self._images)
        # Left by an instance whose container was removed by another client; nothing listens there.
        if link.is_symlink():
            link.unlink()
        remove_tree(link)
        if self._images:
            target = self._volumes.path(_mount_name(workspace)) / "link"
            remove_tree(target)
            link.symlink_to(target)
            link = target
            self._move_journal(workspace, journal)
        for directory in (link, journal):
            directory.mkdir(mode=0o700, exist_ok=True)
            for file in os.scandir(directory):
                os.chown(file.path, uid, uid, follow_symlinks=False)
            os.chown(directory, uid, uid)
        return link, journal

    def _move_journal(self, workspace: Workspace, journal: Path) -> None:
        """Move a journal that an earlier version kept in a directory into the image."""
        old = self._journal(workspace, in_image=False)
        if not old.is_dir():
            return
        if not journal.exists():
            new = journal.with_name("journal.new")
            remove_tree(new)
            new.mkdir(mode=0o700)
            for name in ("0", "1"):
                _copy_journal_file(old / name, new / name)
            new.rename(journal)
        remove_tree(old)

    def _journal(self, workspace: Workspace, *, in_image: bool) -> Path:
        if in_image:
            return self._volumes.path(_mount_name(workspace)) / "journal"
        return self._workspaces.directory(workspace.name) / "journal"

    def seal(self, instance_id: str, workspace: Workspace) -> None:
        link = self.socket_directory(instance_id)
        # The instance may have been made when images could not be used, or the other way round.
        journal = self._journal(workspace, in_image=link.is_symlink())
        for directory in (link, journal):
            os.chown(directory, 0, 0)
            # Code that ran before this may have changed the mode, as the owner.
            os.chmod(directory, 0o700)
        _protect_journal(journal)


def _protect_journal(journal: Path) -> None:
    """
    Give the files of an open journal to root. The executor's file descriptors stay valid, and no
    other process can open the files: Linux does not let a process reopen a file that a non-dumpable
    process has open, but gVisor does, through /proc/PID/fd, if the file's permissions allow it.
    """
    directory = os.open(journal, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in os.listdir(directory):
            _protect_file(name, directory)
    finally:
        os.close(directory)


def _protect_file(name: str, directory: int) -> None:
    try:
        file = os.open(name, _JOURNAL_FLAGS, dir_fd=directory)
    except OSError as error:
        # A symbolic link or a socket is not part of the journal: a module of the template made it.
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        return
    try:
        os.fchown(file, 0, 0)
        os.fchmod(file, 0o600)
    finally:
        os.close(file)


def _copy_journal_file(source: Path, target: Path) -> None:
    """Copy only a regular file of a valid size: a hostile image may have left anything there."""
    try:
        fd = os.open(source, _JOURNAL_FLAGS)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            raise
        return
    with open(fd, "rb") as file, target.open("xb") as copy:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_size <= JOURNAL_FILE_SIZE:
            tree_copy.copy_content(file.fileno(), copy.fileno(), status.st_size, threading.Event())


def _mount_name(workspace: Workspace) -> str:
    return f"executor-{workspace.name}"
