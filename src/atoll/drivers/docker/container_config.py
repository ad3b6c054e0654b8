"""
What a container is made with. Pure: a description goes in, the engine's JSON comes out.

Nothing of the image decides how it is confined: its user, its entry point, its volumes and its
health check are set aside, and the executor is the first process of the container.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.drivers.shared import variables
from atoll.drivers.shared.executor_bundle import BOOT, SOCKET
from atoll.drivers.shared.packages import install_program
from atoll.drivers.shared.paths import EXECUTOR, INSIDE, PACKAGES

if TYPE_CHECKING:
    from atoll.model.resources import Resources

UID = 1000
"""Of installations, and of workspaces of earlier versions; others have a uid of their own."""
WORKSPACE = "/workspace"
TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - inside
LINK = "/run/atoll/link"
"""Directory, inside, of the socket on which the executor listens."""
JOURNAL = "/run/atoll/journal"
OWN_PROCESSES = 8
"""Processes of ours beside those of user code, with some for requests that concern files."""
EXECUTOR_PROCESSES = 2
"""Those that are always there: the supervisor and the zygote."""
SUPERVISOR_SCORE, USER_SCORE = 500, 1000
"""Of two processes the kernel ends that with the higher score first, when memory runs out."""
KERNEL_THREADS, KERNEL_SHARE = 256, 4
"""What a runtime with a kernel of its own takes of the host's: for itself, and for each process."""
MASKED = (
    "/sys", "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kallsyms", "/proc/kcore",
    "/proc/keys", "/proc/latency_stats", "/proc/modules", "/proc/sched_debug", "/proc/scsi",
    "/proc/timer_list", "/proc/timer_stats",
)  # fmt: skip
"""What tells of the machine: all that engines mask by themselves, and more."""
MAX_SIGNALS = 4096
"""Signals that wait, and timers, of all processes of a uid."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Base:
    """What of an image a container is made with."""

    image: str
    """By its id: a tag may be another image by now."""
    python: tuple[str, ...]
    """The command that is the interpreter inside."""
    executable: str
    """The same as one program, for others to start."""
    path: str
    """Where programs are looked for."""
    runtime: str = ""
    """Of the engine, by name; its default when empty."""
    own_kernel: bool = False
    """Whether the runtime brings a kernel of its own, such as gVisor's."""
    mounts: tuple[dict[str, Any], ...] = ()
    """What the interpreter needs, where it is not the image's."""
    volumes: tuple[str, ...] = ()
    """Paths inside for which the image wants volumes."""


@dataclass(frozen=True)
class Container:
    base: Base
    labels: dict[str, str]
    mounts: tuple[dict[str, Any], ...]
    resources: Resources
    uid: int
    environment: str | None = None
    """The template's own packages, as a path inside."""
    tmp_size: int = 64 * 1024 * 1024
    open_files: int = 1024
    relays: int = 0
    """Processes of links, beside all others."""


@dataclass(frozen=True)
class Installation:
    """A container in which packages are installed: as an instance's, but for what is mounted."""

    base: Base
    labels: dict[str, str]
    mounts: tuple[dict[str, Any], ...]
    resources: Resources
    uid: int = UID
    tmp_size: int = 64 * 1024 * 1024
    open_files: int = 1024
    relays: int = 0


def body(container: Container) -> dict[str, Any]:
    """For `POST /containers/create`."""
    base, own = container.base, container.environment or ""
    env = {
        **variables.INSTANCE,
        "PATH": f"{own and f'{own}/bin:'}{base.path}:{INSIDE}/bin",
        "PYTHONPATH": f"{own and f'{own}:'}{INSIDE}/lib",
        "ATOLL_PYTHON": base.executable,
    }
    program = ["-I", "-S", "-B", "-c", BOOT.format(path=EXECUTOR), "-"]
    return _body(container, WORKSPACE, env, program)


def installation_body(container: Installation) -> dict[str, Any]:
    env = {**variables.INSTALLATION, "PATH": container.base.path}
    program = ["-I", "-S", "-B", install_program.PROGRAM, install_program.STANDARD]
    made = _body(container, install_program.BUILD, env, program)
    # What goes through its standard streams is in nobody's log, and it ends with who started it:
    # nobody would take what it makes.
    made["HostConfig"] |= {"LogConfig": {"Type": "none"}, "AutoRemove": True}
    return made


def _body(
    container: Container | Installation, workdir: str, env: dict[str, str], program: list[str]
) -> dict[str, Any]:
    base, resources = container.base, container.resources
    tmpfs = f"rw,exec,nosuid,nodev,mode=1777,size={container.tmp_size}"
    host: dict[str, Any] = {
        "Mounts": [*base.mounts, *container.mounts],
        "NetworkMode": "none",
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "ReadonlyRootfs": True,
        "Tmpfs": dict.fromkeys(sorted(_temporary(container)), tmpfs),
        "ShmSize": container.tmp_size,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "MaskedPaths": list(MASKED),
        **limits(resources, relays=container.relays),
        "OomScoreAdj": SUPERVISOR_SCORE,
        "Ulimits": [
            {"Name": "core", "Soft": 0, "Hard": 0},
            {"Name": "memlock", "Soft": 65_536, "Hard": 65_536},
            {"Name": "msgqueue", "Soft": 819_200, "Hard": 819_200},
            {"Name": "nofile", "Soft": container.open_files, "Hard": container.open_files},
            {"Name": "sigpending", "Soft": MAX_SIGNALS, "Hard": MAX_SIGNALS},
        ],
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "64k", "max-file": "1"}},
        "RestartPolicy": {"Name": "no"},
    }
    if base.runtime:
        host["Runtime"] = base.runtime
    if base.own_kernel:
        # To the host's kernel that is a program with threads of its own, which ends when it gets no
        # more of them. User code is held by its own kernel, which counts this container alone.
        most = resources.max_processes + OWN_PROCESSES
        host["Ulimits"].append({"Name": "nproc", "Soft": most, "Hard": most})
        host["PidsLimit"] = KERNEL_THREADS + KERNEL_SHARE * host["PidsLimit"]
    return {
        "Image": base.image,
        "Hostname": "sandbox",
        "User": f"{container.uid}:{container.uid}",
        "WorkingDir": workdir,
        "Entrypoint": [*base.python, *program],
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in env.items()],
        "Labels": container.labels,
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGTERM",
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "Tty": False,
        "HostConfig": host,
    }


def _temporary(container: Container | Installation) -> set[str]:
    """
    What the image wants volumes for is a temporary place too: those that the engine would make
    could be written to without a limit.
    """
    base = container.base
    mounted = {str(mount["Target"]) for mount in (*base.mounts, *container.mounts)}
    return {*TEMPORARY, *(posixpath.normpath(path) for path in base.volumes)} - mounted


def limits(resources: Resources, *, relays: int) -> dict[str, Any]:
    """What can be changed while it runs, too."""
    return {
        "Memory": resources.memory,
        # With swap the same, there is none.
        "MemorySwap": resources.memory,
        "NanoCpus": int(resources.cpu * 1_000_000_000),
        "PidsLimit": resources.max_processes + OWN_PROCESSES + relays,
    }


def config(
    *,
    token: str,
    listen: str,
    peer: int | None,
    journal: tuple[str, ...],
    preload: tuple[str, ...],
    environment: str | None,
    ephemeral: bool,
    unattended: float | None,
    seccomp: bytes | None,
) -> dict[str, Any]:
    """
    What the executor is told on its standard input. `peer` is the user of the processes inside that
    may connect to it; without, none may.
    """
    return {
        "token": token,
        "listen": listen,
        "peer": peer,
        "journal": list(journal),
        "preload": list(preload),
        "hooks": True,
        "inside": SOCKET,
        "packages": environment or "",
        "ephemeral": ephemeral,
        "unattended": unattended,
        "oom_score": USER_SCORE,
        "seccomp": "" if seccomp is None else seccomp.hex(),
    }


def bind(source: str, target: str, *, read_only: bool) -> dict[str, Any]:
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": read_only}


def shared(executor: str, inside: str, packages: str | None) -> list[dict[str, Any]]:
    """What all containers of a node have of it."""
    found = [
        bind(executor, EXECUTOR, read_only=True),
        bind(inside, INSIDE, read_only=True),
    ]
    if packages is not None:
        found.append(bind(packages, PACKAGES, read_only=True))
    return found
