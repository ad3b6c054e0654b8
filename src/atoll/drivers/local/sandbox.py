"""
The bubblewrap command of an instance.

Pure: a description of what there is on the host goes in, a list of arguments comes out. The root is
a read-only tmpfs with the template's top-level directories bound into it; what is writable is
/workspace, /tmp and /dev/shm, each with a limit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from atoll.drivers.local.sandbox_start import (
    CALLBACK_FD,
    INFO_FD,
    JOURNAL_FDS,
    LISTEN_FD,
    SECCOMP_FD,
)
from atoll.drivers.shared import variables
from atoll.drivers.shared.executor_bundle import BOOT, SOCKET
from atoll.drivers.shared.packages import install_program
from atoll.drivers.shared.paths import EXECUTOR, INSIDE, PACKAGES

if TYPE_CHECKING:
    from collections.abc import Callable

UID = 1000
LAYERED = "layered:"
HIDDEN = (
    "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/kallsyms", "/proc/cmdline",
    "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list",
    "/proc/vmallocinfo",
    "/proc/modules", "/proc/partitions", "/proc/diskstats", "/proc/swaps", "/proc/mdstat",
    "/proc/sysvipc", "/proc/fs", "/proc/driver", "/proc/tty", "/proc/interrupts",
)  # fmt: skip
"""Parts of /proc that tell about the host; covered where the host has them."""


@dataclass(frozen=True)
class RootFileSystem:
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
    layers: tuple[str, ...] = ()
    """
    Directories that are one file system together, the highest first; sources in `binds` that begin
    with `LAYERED` lie in it.
    """


@dataclass(frozen=True)
class Sandbox:
    tree: RootFileSystem
    executor: str
    inside: str
    """Directory with what code in the sandbox may import and call."""
    workspace: str
    packages: str
    """Directory with the package environments."""
    environment: str | None = field(default=None, kw_only=True)
    """The template's own among them, as a path inside."""
    hidden: tuple[str, ...]
    """Files and directories of /proc to cover; directories end with a slash."""
    tmp_size: int
    preload: tuple[str, ...] = ()
    hooks: bool = True
    """Whether start-up code that the interpreter's packages bring is run."""
    seccomp: bool = True
    ephemeral: bool = False
    unattended: float | None = None
    """Seconds without a link after which an instance without a session ends; never when null."""
    reports_as: str | None = None
    """The instance's id, when its executor reports to a callback address."""
    volumes: tuple[tuple[str, str, bool], ...] = ()
    """Source on the host, place inside, whether it is read-only."""


@dataclass(frozen=True)
class Installation:
    """The sandbox in which packages are installed: as an instance's, but for what is bound."""

    tree: RootFileSystem
    program: str
    """What runs in it."""
    uv: str
    gateway: str | None
    """Socket of the only thing outside that can be reached; none when nothing needs to be."""
    build: str
    """Directory that it may write to."""
    hidden: tuple[str, ...]
    tmp_size: int
    seccomp: bool = True


def arguments(bubblewrap: str, sandbox: Sandbox, source: Callable[[str], str]) -> list[str]:
    """`source` says where bubblewrap finds a path of the host."""
    tree, own = sandbox.tree, sandbox.environment or ""
    config = json.dumps(
        {
            "listen_fd": LISTEN_FD,
            "journal_fds": JOURNAL_FDS,
            "preload": list(sandbox.preload),
            "hooks": sandbox.hooks,
            # Address and token are in the file: a command line is open to user code.
            "callback": sandbox.reports_as and {"fd": CALLBACK_FD, "instance": sandbox.reports_as},
            "inside": SOCKET,
            "packages": own,
            "unattended": sandbox.unattended,
        }
    )
    return [
        bubblewrap,
        *_confinement(seccomp=sandbox.seccomp, ephemeral=sandbox.ephemeral),
        *_environment(variables.INSTANCE),
        "--setenv", "PATH", f"{own and f'{own}/bin:'}{tree.path}:{INSIDE}/bin",
        "--setenv", "PYTHONPATH", f"{own and f'{own}:'}{INSIDE}/lib",
        "--setenv", "ATOLL_PYTHON", tree.python,
        *_root(_beside(tree, sandbox.volumes), sandbox.hidden, sandbox.tmp_size, source),
        "--ro-bind", source(sandbox.executor), EXECUTOR,
        "--ro-bind", source(sandbox.inside), INSIDE,
        "--ro-bind", source(sandbox.packages), PACKAGES,
        "--bind", source(sandbox.workspace), "/workspace",
        *_volumes(sandbox, source),
        "--remount-ro", "/",
        "--chdir", "/workspace",
        tree.python, "-I", "-S", "-B", "-c", BOOT.format(path=EXECUTOR), config,
    ]  # fmt: skip


def installation_arguments(
    bubblewrap: str, sandbox: Installation, source: Callable[[str], str]
) -> list[str]:
    tree = sandbox.tree
    argv = [
        bubblewrap,
        # It ends with who started it: nobody would take what it makes.
        *_confinement(seccomp=sandbox.seccomp, ephemeral=True),
        *_environment(variables.INSTALLATION),
        "--setenv", "PATH", tree.path,
        *_root(tree, sandbox.hidden, sandbox.tmp_size, source),
        "--ro-bind", source(sandbox.program), install_program.PROGRAM,
        "--ro-bind", source(sandbox.uv), install_program.UV,
    ]  # fmt: skip
    if sandbox.gateway is not None:
        argv += ["--ro-bind", source(sandbox.gateway), install_program.GATEWAY]
    return [
        *argv,
        "--bind", source(sandbox.build), install_program.BUILD,
        "--remount-ro", "/",
        "--chdir", install_program.BUILD,
        tree.python, "-I", "-S", "-B", install_program.PROGRAM,
    ]  # fmt: skip


def _confinement(*, seccomp: bool, ephemeral: bool) -> list[str]:
    """What is taken from every sandbox."""
    argv = [
        "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
        "--unshare-cgroup-try",
        "--uid", str(UID), "--gid", str(UID),
        "--hostname", "sandbox",
        "--cap-drop", "ALL",
        "--as-pid-1",
        "--new-session",
        "--info-fd", str(INFO_FD),
        "--clearenv",
    ]  # fmt: skip
    if seccomp:
        argv += ["--seccomp", str(SECCOMP_FD)]
    if ephemeral:
        argv += ["--die-with-parent"]
    return argv


def _environment(variables: dict[str, str]) -> list[str]:
    return [word for name, value in variables.items() for word in ("--setenv", name, value)]


def _root(
    tree: RootFileSystem, hidden: tuple[str, ...], tmp_size: int, source: Callable[[str], str]
) -> list[str]:
    """The template's tree, and what of it is the sandbox's own."""
    argv: list[str] = []
    for host, inside in tree.binds:
        argv += ["--ro-bind", source(host), inside]
    for target, inside in tree.links:
        argv += ["--symlink", target, inside]
    argv += ["--proc", "/proc"]
    for path in hidden:
        if path.endswith("/"):
            argv += ["--perms", "0555", "--size", "4096", "--tmpfs", path, "--remount-ro", path]
        else:
            argv += ["--ro-bind", "/dev/null", path]
    size = str(tmp_size)
    return [
        *argv,
        "--dev", "/dev",
        "--perms", "1777", "--size", size, "--tmpfs", "/dev/shm",
        "--remount-ro", "/dev",
        "--perms", "1777", "--size", size, "--tmpfs", "/tmp",
        "--dir", "/run",
        "--dir", "/var",
        "--symlink", "/tmp", "/var/tmp",
    ]  # fmt: skip


def _beside(tree: RootFileSystem, volumes: tuple[tuple[str, str, bool], ...]) -> RootFileSystem:
    """What the template has where volumes are is hidden: nothing could be mounted in it."""
    tops = {f"/{path.split('/')[1]}" for _, path, _ in volumes}
    return replace(
        tree,
        binds=tuple(item for item in tree.binds if item[1] not in tops),
        links=tuple(item for item in tree.links if item[1] not in tops),
    )


def _volumes(sandbox: Sandbox, source: Callable[[str], str]) -> list[str]:
    argv: list[str] = []
    for host, path, read_only in sandbox.volumes:
        argv += ["--ro-bind" if read_only else "--bind", source(host), path]
    return argv
