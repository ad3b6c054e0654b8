"""
Ends instances that no server takes over. Used by the spawner; standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

SUPERVISOR_GROUP = "supervisor"
"""Name of the supervisor's control group, in version 2."""


@contextlib.contextmanager
def unserved(locks: list[str]) -> Iterator[bool]:
    """
    Whether no server holds one of these lock files. Servers that start wait until the block ends. A
    file that cannot be opened counts as held: no instance may be killed on a guess.
    """
    with contextlib.ExitStack() as held:
        for path in locks:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                yield False
                return
            held.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
        yield True


def identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _group_directories(join_files: list[str]) -> list[str]:
    """Directories of an instance's control groups; the top one is the last."""
    found: list[str] = []
    for path in join_files:
        top = os.path.dirname(path)
        if os.path.basename(top) == SUPERVISOR_GROUP:
            top = os.path.dirname(top)
        with contextlib.suppress(OSError):
            found += [entry.path for entry in os.scandir(top) if entry.is_dir()]
        found.append(top)
    return found


def kill_instance(pid: int, request: dict[str, Any]) -> None:
    """Kill an instance, frozen or not: with its PID 1, all of its processes end."""
    child = request.get("child", 0)
    for process in (child if _parent(child) == pid else 0, pid):
        with contextlib.suppress(ProcessLookupError):
            if process:
                os.kill(process, signal.SIGKILL)
    for directory in _group_directories(request["groups"]):
        # In version 1, frozen processes cannot be killed.
        with contextlib.suppress(OSError), open(f"{directory}/freezer.state", "r+") as state:
            state.write("THAWED")


def has_groups(request: dict[str, Any]) -> bool:
    return any(os.path.isdir(path) for path in _group_directories(request["groups"]))


def remove_groups(request: dict[str, Any]) -> bool:
    """Remove the groups of an instance that has ended; False while a process is in them."""
    for directory in _group_directories(request["groups"]):
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            pass
        except OSError:
            return False
        # The group of all instances of the node, if this was the last one.
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(directory))
    return True
