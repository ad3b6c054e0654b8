"""
The bubblewrap command of an instance.

Pure: takes a description of the host's files, returns a list of arguments. The root is a read-only
tmpfs with the template's top-level directories bound into it. Only /workspace, /tmp and /dev/shm
are writable, each with a limit.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from atoll.drivers.local.sandbox_start import (
    CALLBACK_FD,
    INFO_FD,
    JOURNAL_FDS,
    LISTEN_FD,
    SECCOMP_FD,
)
from atoll.drivers.shared import environment_variables
from atoll.drivers.shared.executor_bundle import BOOT, SOCKET
from atoll.drivers.shared.instance_paths import EXECUTOR, INSIDE, PACKAGES
from atoll.drivers.shared.packages import install_program

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
"""Parts of /proc with information about the host; covered if they exist."""


@dataclass(frozen=True)
class RootFileSystem:
    """
    The read-only files of a sandbox: directories and files to bind, symbolic links to make.
    """

    binds: tuple[tuple[str, str], ...]
    """Sources on the host and paths in the sandbox; read-only."""
    links: tuple[tuple[str, str], ...]
    """Targets, and paths in the sandbox."""
    python: str
    """Path of the interpreter in the sandbox."""
    path: str = "/usr/local/bin:/usr/bin:/bin"
    layers: tuple[str, ...] = ()
    """
    Directories that are mounted as one file system, the highest first; sources in `binds` that
    begin with `LAYERED` are paths in it.
    """


@dataclass(frozen=True)
class Sandbox:
    tree: RootFileSystem
    executor: str
    inside: str
    """Directory of what user code may import and call."""
    workspace: str
    packages: str
    """Directory with the package environments."""
    environment: str | None = field(default=None, kw_only=True)
    """The template's package environment, as a path in the sandbox."""
    hidden: tuple[str, ...]
    """Files and directories of /proc to cover; directories end with a slash."""
    tmp_size: int
    preload: tuple[str, ...] = ()
    hooks: bool = True
    """Whether .pth files and sitecustomize of the interpreter are run."""
    seccomp: bool = True
    ephemeral: bool = False
    unattended: float | None = None
    """Seconds without a link after which the executor exits; never if not set."""
    reports_as: str | None = None
    """The instance's id, if its executor reports to a callback address."""
    volumes: tuple[tuple[str, str, bool], ...] = ()
    """Source on the host, path in the sandbox, and whether it is read-only."""


@dataclass(frozen=True)
class Installation:
    """The sandbox in which packages are installed; it has other mounts than an instance's."""

    tree: RootFileSystem
    program: str
    """The file of `install_program`."""
    uv: str
    gateway: str | None
    """The socket of the package index, if the order needs it."""
    build: str
    """The writable directory."""
    hidden: tuple[str, ...]
    tmp_size: int
    seccomp: bool = True


def arguments(bubblewrap: str, sandbox: Sandbox, source: Callable[[str], str]) -> list[str]:
    """`source` maps paths of the host to sources of mounts."""
    tree, own = sandbox.tree, sandbox.environment or ""
    config = json.dumps(
        {
            "listen_fd": LISTEN_FD,
            "journal_fds": JOURNAL_FDS,
            "preload": list(sandbox.preload),
            "hooks": sandbox.hooks,
            # Address and token are in a file, because user code can read the command line.
            "callback": sandbox.reports_as and {"fd": CALLBACK_FD, "instance": sandbox.reports_as},
            "inside": SOCKET,
            "packages": own,
            "unattended": sandbox.unattended,
        }
    )
    return [
        bubblewrap,
        *_confinement(seccomp=sandbox.seccomp, ephemeral=sandbox.ephemeral),
        *_environment(instance_environment(tree.python, tree.path, own)),
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


def instance_environment(python: str, path: str, own: str = "") -> dict[str, str]:
    """`own` is the template's package environment, if it has one."""
    return {
        **environment_variables.INSTANCE,
        "PATH": f"{own and f'{own}/bin:'}{path}:{INSIDE}/bin",
        "PYTHONPATH": f"{own and f'{own}:'}{INSIDE}/lib",
        "ATOLL_PYTHON": python,
        "PWD": "/workspace",
    }


def fork_server_files(tree: RootFileSystem, executor: str, inside: str) -> list[str]:
    """Options for the files that the fork server shares with instances, at the same paths."""
    return [
        *_root(tree, (), mmap.PAGESIZE, str),
        "--ro-bind", executor, EXECUTOR,
        "--ro-bind", inside, INSIDE,
    ]  # fmt: skip


def installation_arguments(
    bubblewrap: str, sandbox: Installation, source: Callable[[str], str]
) -> list[str]:
    tree = sandbox.tree
    argv = [
        bubblewrap,
        # Ends with its server, which alone could use the result.
        *_confinement(seccomp=sandbox.seccomp, ephemeral=True),
        *_environment(environment_variables.INSTALLATION),
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
    """The isolation of every sandbox."""
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
    """The root file system, with the sandbox's own /proc, /dev, /tmp, /run and /var."""
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
    """Leave out top-level directories with volumes: bound ones are read-only for mount points."""
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
