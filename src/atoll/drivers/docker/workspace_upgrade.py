"""
Workspaces that earlier versions kept in directories, moved into file system images.

A workspace is moved when its next instance is made, before anything uses it. The record changes
last, in one step, and the directory goes after that: until then a move that was interrupted is
begun anew, and nothing is lost. A file lock keeps replicas of a node from moving one workspace at
the same time. Blocking file work; callers use a thread.
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

from atoll.drivers.shared import mount_calls, tree_copy
from atoll.drivers.shared.file_trees import remove_tree
from atoll.drivers.shared.mount_points import unmount
from atoll.drivers.shared.workspaces import DIRECTORY, IMAGE
from atoll.executor.files import removal

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.drivers.shared.workspaces import Workspace, Workspaces

FILES, TOP, LOCK = "files", "top", "move.lock"
"""Beside a workspace's record: its directory, where its image is mounted meanwhile, the lock."""
MAX_DOUBLINGS = 6
"""What was written past a limit that was only watched is kept: the image is made larger."""

log = structlog.get_logger(__name__)


def moved(workspaces: Workspaces, workspace: Workspace) -> Workspace:
    """The workspace as an image, with a uid of its own; unchanged when it is no directory."""
    directory = workspaces.directory(workspace.name)
    if workspace.kind != DIRECTORY and not (directory / FILES).exists():
        return workspace
    with (directory / LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another replica may have moved it meanwhile.
        result = _move(workspaces, workspaces.get(workspace.name) or workspace)
        # Who waits for it finds that it was moved; who comes later does not need it.
        (directory / LOCK).unlink(missing_ok=True)
    return result


def unmount_interrupted_move(workspaces: Workspaces, name: str) -> None:
    """What a move that was killed has left mounted in a workspace that is to be removed."""
    unmount(workspaces.directory(name) / TOP)


def _move(workspaces: Workspaces, workspace: Workspace) -> Workspace:
    directory = workspaces.directory(workspace.name)
    files = directory / FILES
    if workspace.kind != DIRECTORY:
        if workspace.kind == IMAGE:
            remove_tree(files)  # What a move that was interrupted at its end has left.
        return workspace
    image, top = directory / "disk", directory / TOP
    size, uid = workspace.size, workspaces.new_uid()
    top.mkdir(mode=0o700, exist_ok=True)
    for attempt in range(MAX_DOUBLINGS + 1):
        unmount(top)
        image.unlink(missing_ok=True)
        workspaces.make_image(image, size)
        try:
            _fill(image, top, files, uid)
            break
        except OSError as error:
            if error.errno != errno.ENOSPC or attempt == MAX_DOUBLINGS:
                raise
            size *= 2
        finally:
            unmount(top)
    top.rmdir()
    result = replace(workspace, kind=IMAGE, uid=uid, size=size)
    workspaces.update(result)
    log.info("workspace.moved", workspace=workspace.name, size=size)
    remove_tree(files)
    return result


def _fill(image: Path, top: Path, files: Path, uid: int | None) -> None:
    mount_calls.mount_image(str(image), str(top))
    (top / "lost+found").rmdir()
    # Beside the files while they are copied; in the same file system, as hard links need.
    links = top / f".links-{os.urandom(8).hex()}"
    links.mkdir(mode=0o700)
    with contextlib.ExitStack() as held:
        fds = []
        for directory in (files, top, links):
            fds.append(os.open(directory, removal.DIRECTORY))
            held.callback(os.close, fds[-1])
        tree_copy.TreeCopy(fds[0], fds[1], uid, fds[2], threading.Event()).run()
    remove_tree(links)
