"""
The bubblewrap command of an instance.

Pure: a description of what there is on the host goes in, a list of arguments comes out. The root is
a read-only tmpfs with the template's top-level directories bound into it; what is writable is
/workspace, /tmp and /dev/shm, each with a limit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.drivers.bundle import BOOT, SOCKET
from atoll.drivers.local.spawner import (
    CALLBACK_FD,
    INFO_FD,
    JOURNAL_FDS,
    LISTEN_FD,
    SECCOMP_FD,
)

if TYPE_CHECKING:
    from collections.abc import Callable

UID = 1000
ENV = {"HOME": "/tmp", "USER": "sandbox", "LC_ALL": "C.UTF-8", "TERM": "dumb"}
EXECUTOR = "/run/atoll/executor.pyz"
INSIDE = "/run/atoll/inside"
HIDDEN = (
    "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/kallsyms", "/proc/cmdline",
    "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list",
    "/proc/vmallocinfo",
    "/proc/modules", "/proc/partitions", "/proc/diskstats", "/proc/swaps", "/proc/mdstat",
    "/proc/sysvipc", "/proc/fs", "/proc/driver", "/proc/tty", "/proc/interrupts",
)  # fmt: skip
"""Parts of /proc that tell about the host; covered where the host has them."""


@dataclass(frozen=True)
class Tree:
    """
    What of a root file system goes into the sandbox: directories and files to bind, links to make.
    """

    binds: tuple[tuple[str, str], ...]
    """Source on the host, place inside; read-only."""
    links: tuple[tuple[str, str], ...]
    """Target, place inside."""
    python: str
    """Interpreter, as a path inside."""
    path: str = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True)
class Sandbox:
    tree: Tree
    executor: str
    inside: str
    """Directory with what code in the sandbox may import and call."""
    workspace: str
    hidden: tuple[str, ...]
    """Files and directories of /proc to cover; directories end with a slash."""
    tmp_size: int
    preload: tuple[str, ...] = ()
    hooks: bool = True
    """Whether start-up code that the interpreter's packages bring is run."""
    seccomp: bool = True
    ephemeral: bool = False
    reports_as: str | None = None
    """The instance's id, when its executor reports to a callback address."""
    volumes: tuple[tuple[str, str, bool], ...] = ()
    """Source on the host, place inside, whether it is read-only."""


def arguments(bubblewrap: str, sandbox: Sandbox, source: Callable[[str], str]) -> list[str]:
    """`source` says where bubblewrap finds a path of the host."""
    tree = sandbox.tree
    config = json.dumps(
        {
            "listen_fd": LISTEN_FD,
            "journal_fds": JOURNAL_FDS,
            "preload": list(sandbox.preload),
            "hooks": sandbox.hooks,
            # Address and token are in the file: a command line is open to user code.
            "callback": sandbox.reports_as and {"fd": CALLBACK_FD, "instance": sandbox.reports_as},
            "inside": SOCKET,
        }
    )
    argv = [
        bubblewrap,
        "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
        "--unshare-cgroup-try",
        "--uid", str(UID), "--gid", str(UID),
        "--hostname", "sandbox",
        "--cap-drop", "ALL",
        "--as-pid-1",
        "--new-session",
        "--info-fd", str(INFO_FD),
        "--clearenv",
        "--setenv", "PATH", f"{tree.path}:{INSIDE}/bin",
        "--setenv", "PYTHONPATH", f"{INSIDE}/lib",
        "--setenv", "ATOLL_PYTHON", tree.python,
        *(word for name, value in ENV.items() for word in ("--setenv", name, value)),
    ]  # fmt: skip
    if sandbox.seccomp:
        argv += ["--seccomp", str(SECCOMP_FD)]
    if sandbox.ephemeral:
        argv += ["--die-with-parent"]
    for host, inside in tree.binds:
        argv += ["--ro-bind", source(host), inside]
    for target, inside in tree.links:
        argv += ["--symlink", target, inside]
    argv += ["--proc", "/proc"]
    for path in sandbox.hidden:
        if path.endswith("/"):
            argv += ["--perms", "0555", "--size", "4096", "--tmpfs", path, "--remount-ro", path]
        else:
            argv += ["--ro-bind", "/dev/null", path]
    size = str(sandbox.tmp_size)
    argv += [
        "--dev", "/dev",
        "--perms", "1777", "--size", size, "--tmpfs", "/dev/shm",
        "--remount-ro", "/dev",
        "--perms", "1777", "--size", size, "--tmpfs", "/tmp",
        "--dir", "/run",
        "--dir", "/var",
        "--symlink", "/tmp", "/var/tmp",
        "--ro-bind", source(sandbox.executor), EXECUTOR,
        "--ro-bind", source(sandbox.inside), INSIDE,
        "--bind", source(sandbox.workspace), "/workspace",
        *_volumes(sandbox, source),
        "--remount-ro", "/",
        "--chdir", "/workspace",
        tree.python, "-I", "-S", "-B", "-c", BOOT.format(path=EXECUTOR), config,
    ]  # fmt: skip
    return argv


def _volumes(sandbox: Sandbox, source: Callable[[str], str]) -> list[str]:
    """Where the template has a directory of the same name, the one with the volumes hides it."""
    argv: list[str] = []
    bound = {inside for _, inside in sandbox.tree.binds}
    hidden = sorted({f"/{path.split('/')[1]}" for _, path, _ in sandbox.volumes} & bound)
    for top in hidden:
        argv += ["--perms", "0755", "--size", "65536", "--tmpfs", top]
    for host, path, read_only in sandbox.volumes:
        argv += ["--ro-bind" if read_only else "--bind", source(host), path]
    for top in hidden:
        argv += ["--remount-ro", top]
    return argv
