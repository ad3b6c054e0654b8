"""
Moves workspaces that earlier versions kept in directories into file system images.

A workspace is moved when its next instance is made, before anything uses it. The record changes
last and atomically, and the directory is removed after that. A move that was interrupted starts
again, and nothing is lost. A file lock prevents two replicas of a node from moving the same
workspace at the same time. Blocking file system work; callers use a thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from atoll.drivers.shared import mount_syscalls, tree_copy
from atoll.drivers.shared.file_trees import remove_tree
from atoll.drivers.shared.mount_points import unmount
from atoll.drivers.shared.workspace_files import DIRECTORY, IMAGE
from atoll.executor.files import removal

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.drivers.shared.workspace_files import Workspace, WorkspaceFiles

FILES, MOUNT_POINT, LOCK = "files", "top", "move.lock"
"""Beside a workspace's record: its directory, the temporary mount of its image, and the lock."""
MAX_DOUBLINGS = 6
"""
User code may have written past a limit that was not enforced by a file system. Such files are kept
and the size of the image is doubled until they fit.
"""

log = structlog.get_logger(__name__)


def as_image(workspaces: WorkspaceFiles, workspace: Workspace) -> Workspace:
    """The workspace as an image with a uid of its own; unchanged if it is not a directory."""
    directory = workspaces.directory(workspace.name)
    if workspace.kind != DIRECTORY and not (directory / FILES).exists():
        return workspace
    with (directory / LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another replica may have moved it meanwhile.
        result = _move(workspaces, workspaces.get(workspace.name) or workspace)
        # A waiting process sees that the workspace was moved; a later one does not need the lock.
        (directory / LOCK).unlink(missing_ok=True)
    return result


def unmount_interrupted_move(workspaces: WorkspaceFiles, name: str) -> None:
    """Unmount the image of a move that was killed, before the workspace is removed."""
    unmount(workspaces.directory(name) / MOUNT_POINT)


def _move(workspaces: WorkspaceFiles, workspace: Workspace) -> Workspace:
    directory = workspaces.directory(workspace.name)
    files = directory / FILES
    if workspace.kind != DIRECTORY:
        if workspace.kind == IMAGE:
            remove_tree(files)  # Left by a move that was interrupted at its end.
        return workspace
    image, mount_point = directory / "disk", directory / MOUNT_POINT
    size, uid = workspace.size, workspaces.new_uid()
    mount_point.mkdir(mode=0o700, exist_ok=True)
    for attempt in range(MAX_DOUBLINGS + 1):
        unmount(mount_point)
        image.unlink(missing_ok=True)
        workspaces.make_image(image, size)
        try:
            _fill(image, mount_point, files, uid)
            break
        except OSError as error:
            if error.errno != errno.ENOSPC or attempt == MAX_DOUBLINGS:
                raise
            size *= 2
        finally:
            unmount(mount_point)
    mount_point.rmdir()
    result = replace(workspace, kind=IMAGE, uid=uid, size=size)
    workspaces.update(result)
    log.info("workspace.moved", workspace=workspace.name, size=size)
    remove_tree(files)
    return result


def _fill(image: Path, mount_point: Path, files: Path, uid: int | None) -> None:
    mount_syscalls.mount_image(str(image), str(mount_point))
    (mount_point / "lost+found").rmdir()
    # Scratch space of the copy; hard links need it in the same file system.
    links = mount_point / f".links-{os.urandom(8).hex()}"
    links.mkdir(mode=0o700)
    with contextlib.ExitStack() as held:
        fds = []
        for directory in (files, mount_point, links):
            fds.append(os.open(directory, removal.DIRECTORY))
            held.callback(os.close, fds[-1])
        tree_copy.TreeCopy(fds[0], fds[1], uid, fds[2], threading.Event()).run()
    remove_tree(links)
