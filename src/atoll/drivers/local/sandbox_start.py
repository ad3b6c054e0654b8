"""
What a forked child of the spawner does before it becomes bubblewrap: control groups, mounts, limits
and the host uid. Standard library alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
from typing import Any, NoReturn

from atoll.drivers.shared.mount_syscalls import (
    MNT_DETACH,
    MS_BIND,
    MS_NOATIME,
    MS_NODEV,
    MS_NOSUID,
    MS_RDONLY,
    MS_REC,
    check,
    libc,
    mount,
    mount_image,
    mount_mapped,
    own_mounts,
    unescaped,
)

ROOT = "root"
"""Name in the stage: the root file system of a template with layers."""
OWNER = "ATOLL_OWNER"
"""
Environment variable of bubblewrap, or of a fork: the data directory that the instance belongs to.
"""
LISTEN_FD, SECCOMP_FD, INFO_FD = 3, 4, 5
JOURNAL_FDS = (6, 7)
CALLBACK_FD = 8


def _unmount_others(directory: str) -> None:
    """
    Unmount, in this namespace alone, what is mounted below the directory. Otherwise the instance
    would keep mounts of other instances busy as long as it lives.
    """
    prefix = os.fsencode(directory) + b"/"
    with open("/proc/self/mountinfo", "rb") as file:
        found = [unescaped(line.split()[4]) for line in file]
    for path in reversed(found):
        if path.startswith(prefix):
            check(libc.umount2(path, MNT_DETACH), f"unmounting {os.fsdecode(path)}")


def mount_stage(stage: str) -> None:
    """An empty directory in a mount namespace of this process, which any uid can reach."""
    own_mounts()
    mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")


def mount_layers(stage: str, directories: list[str]) -> None:
    """Mount several directories, the highest first, as one read-only root file system."""
    # Under short names: overlay options cannot have colons and commas, and have a limit.
    names = []
    for number, directory in enumerate(directories):
        names.append(os.path.join(stage, f"layer{number}"))
        os.mkdir(names[-1])
        mount(directory, names[-1], None, MS_BIND)
    target = os.path.join(stage, ROOT)
    os.mkdir(target)
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOATIME
    mount("overlay", target, "overlay", flags, f"lowerdir={':'.join(names)}")


def prepare_mounts(request: dict[str, Any]) -> None:
    stage = request["stage"]
    mount_stage(stage)
    if request["layers"]:
        mount_layers(stage, request["layers"])
    for source, name in request["binds"]:
        target = os.path.join(stage, name)
        if os.path.isdir(source):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        mount(source, target, None, MS_BIND | MS_REC)
    _unmount_others(request["mounts"])
    if request["image"]:
        target = os.path.join(stage, "workspace")
        os.mkdir(target)
        if request.get("owner") is not None:
            mount_mapped(request["image"], target, request["owner"], request["uid"])
        else:
            mount_image(request["image"], target)
        if os.stat(target).st_uid != request["uid"]:
            os.chown(target, request["uid"], request["uid"])
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(target, "lost+found"))


def join_groups(request: dict[str, Any], pid: int) -> None:
    """Move a process to the instance's control groups."""
    for path in request["groups"]:
        with open(path, "w") as group:
            group.write(str(pid))


def limit(request: dict[str, Any], pid: int) -> None:
    """Set the limits of an instance's process, which those that it starts inherit."""
    with open(f"/proc/{pid}/oom_score_adj", "w") as file:
        file.write("500")
    for name, most in request["rlimits"].items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.prlimit(pid, kind)[1]
        if hard != resource.RLIM_INFINITY and os.geteuid() != 0:
            most = min(most, hard)
        resource.prlimit(pid, kind, (most, most))


def use_descriptors(fds: dict[int, int]) -> None:
    """Give descriptors the numbers under which the next program expects them."""
    # First to high numbers: a target number may be the source of another one.
    moved = {target: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for target, fd in fds.items()}
    for target, fd in moved.items():
        os.dup2(fd, target, inheritable=True)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.setsid()


def become(request: dict[str, Any], fds: dict[int, int], mark: str) -> NoReturn:
    """Replace this process, a fork of the spawner, with bubblewrap."""
    join_groups(request, os.getpid())
    limit(request, os.getpid())
    if request["stage"]:
        prepare_mounts(request)
    use_descriptors({0: os.open("/dev/null", os.O_RDWR), **fds})
    os.chdir("/")
    if request["uid"] is not None:
        become_user(request["uid"])
    # For bubblewrap itself, which clears the environment of the sandbox.
    env = {"PATH": "/usr/bin:/bin", OWNER: mark}
    os.execve(request["argv"][0], request["argv"], env)


def become_user(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
