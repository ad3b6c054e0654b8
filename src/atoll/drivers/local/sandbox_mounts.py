"""
Makes the file system of a sandbox from bubblewrap's options, in the namespaces of this process.

For instances that are forks of the fork server (`forked_start.py`): no program is executed in them,
so bubblewrap cannot make their sandbox. `sandbox.py` describes both kinds of instances by the same
options, and what they mean here is what bubblewrap's manual says. An option that is not known is an
error. Standard library alone.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

from atoll.drivers.shared.mount_syscalls import (
    MNT_DETACH,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    NO_DEVICES,
    NO_SETUID,
    READ_ONLY,
    attach,
    check,
    clone_mount,
    libc,
    mount,
    pivot_root,
    restrict,
    restrict_tree,
)

FLAGS = frozenset({
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
    "--unshare-cgroup-try", "--as-pid-1", "--new-session", "--clearenv", "--die-with-parent",
})  # fmt: skip
VALUES = {
    "--uid": 1, "--gid": 1, "--hostname": 1, "--cap-drop": 1, "--info-fd": 1, "--seccomp": 1,
    "--setenv": 2, "--chdir": 1, "--ro-bind": 2, "--bind": 2, "--symlink": 2, "--proc": 1,
    "--dev": 1, "--tmpfs": 1, "--perms": 1, "--size": 1, "--dir": 1, "--remount-ro": 1,
}  # fmt: skip
"""Options by their number of values."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
READ_ONLY_PROC = ("sys", "sysrq-trigger", "irq", "bus")
"""Parts of /proc through which a process could change the kernel."""
OLD_ROOT = "/.host"
BYTES_PER_INODE, MIN_INODES = 1024, 16
"""
Of a tmpfs: by default the kernel allows so many empty files that they fill the instance's memory.
"""


@dataclass
class Options:
    """Options of bubblewrap, and the command after them."""

    flags: set[str] = field(default_factory=set)
    values: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    file_system: list[tuple[str, list[str]]] = field(default_factory=list)
    """Options that make the file system, in their order."""
    command: list[str] = field(default_factory=list)


def parse(arguments: list[str]) -> Options:
    options = Options()
    rest = iter(arguments)
    for word in rest:
        if not word.startswith("--"):
            options.command = [word, *rest]
        elif word in FLAGS:
            options.flags.add(word)
        elif word not in VALUES:
            raise ValueError(f"unknown option {word}")
        else:
            values = [next(rest) for _ in range(VALUES[word])]
            if word == "--setenv":
                options.environment[values[0]] = values[1]
            elif word in ("--uid", "--gid", "--hostname", "--cap-drop", "--info-fd", "--seccomp",
                          "--chdir"):  # fmt: skip
                options.values[word] = values[0]
            else:
                options.file_system.append((word, values))
    return options


def make(options: Options, base: str) -> None:
    """
    Make the file system and change the root of this mount namespace to it. `base` is a directory on
    which it is mounted until then. The instance's /proc is mounted at /proc already: only its own
    processes can do that.
    """
    umask = os.umask(0o022)
    # Before the root changes: sources are paths of the host.
    proc = clone_mount("/proc")
    sources = [_source(word, values) for word, values in options.file_system]
    devices = {name: clone_mount(f"/dev/{name}") for name in DEVICES}
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    os.mkdir(base + OLD_ROOT)
    pivot_root(base, base + OLD_ROOT)
    os.chdir("/")
    mode, size = "0755", ""
    for (word, values), source in zip(options.file_system, sources, strict=True):
        if word == "--perms":
            mode = values[0]
        elif word == "--size":
            inodes = max(MIN_INODES, int(values[0]) // BYTES_PER_INODE)
            size = f",size={values[0]},nr_inodes={inodes}"
        elif source >= 0:
            _bind(source, values[1])
        elif word == "--symlink":
            os.makedirs(os.path.dirname(values[1]), exist_ok=True)
            os.symlink(values[0], values[1])
        elif word == "--dir":
            os.makedirs(values[0], exist_ok=True)
        elif word == "--proc":
            _make_proc(proc, values[0])
        elif word == "--dev":
            _make_devices(values[0], devices)
        elif word == "--tmpfs":
            os.makedirs(values[0], exist_ok=True)
            flags = MS_NOSUID | MS_NODEV
            mount("tmpfs", values[0], "tmpfs", flags, f"mode={mode}{size}")
            mode, size = "0755", ""
        elif values[0] != "/":
            restrict(values[0], READ_ONLY)
    check(libc.umount2(OLD_ROOT.encode(), MNT_DETACH), "unmounting the host's root")
    os.rmdir(OLD_ROOT)
    if ("--remount-ro", ["/"]) in options.file_system:
        restrict("/", READ_ONLY)
    os.umask(umask)


def _source(word: str, values: list[str]) -> int:
    if word not in ("--bind", "--ro-bind"):
        return -1
    tree = clone_mount(values[0], recursive=True)
    restrict_tree(tree, NO_SETUID | NO_DEVICES | (READ_ONLY if word == "--ro-bind" else 0))
    return tree


def _bind(source: int, target: str) -> None:
    if stat.S_ISDIR(os.fstat(source).st_mode):
        os.makedirs(target, exist_ok=True)
    elif not os.path.lexists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))
    attach(source, target)
    os.close(source)


def _make_proc(proc: int, path: str) -> None:
    _bind(proc, path)
    for name in READ_ONLY_PROC:
        part = f"{path}/{name}"
        if os.path.exists(part):
            tree = clone_mount(part)
            restrict_tree(tree, READ_ONLY)
            _bind(tree, part)


def _make_devices(path: str, devices: dict[str, int]) -> None:
    os.makedirs(path, exist_ok=True)
    mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    for name, device in devices.items():
        restrict_tree(device, NO_SETUID)
        _bind(device, f"{path}/{name}")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{path}/{name}")
    os.symlink("/proc/self/fd", f"{path}/fd")
    os.symlink("/proc/kcore", f"{path}/core")
    os.mkdir(f"{path}/shm", 0o755)
    os.mkdir(f"{path}/pts", 0o755)
    flags = MS_NOSUID | MS_NOEXEC
    mount("devpts", f"{path}/pts", "devpts", flags, "newinstance,ptmxmode=0666,mode=620")
    os.symlink("pts/ptmx", f"{path}/ptmx")
