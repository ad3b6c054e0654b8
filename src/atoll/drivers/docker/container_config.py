"""
Configuration of containers: the JSON body of `POST /containers/create`, from a description.

The image does not decide how its containers are confined. Its user, entry point, volumes and health
check are overridden; the first process of the container is the executor.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.drivers.shared import environment_variables
from atoll.drivers.shared.executor_bundle import BOOT
from atoll.drivers.shared.executor_config import RLIMITS
from atoll.drivers.shared.instance_paths import EXECUTOR, INSIDE, PACKAGES
from atoll.drivers.shared.packages import install_program

if TYPE_CHECKING:
    from atoll.model.resources import Resources

UID = 1000
"""
User of installations, and of workspaces of earlier versions. Other workspaces have uids of their
own.
"""
WORKSPACE = "/workspace"
TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - inside
LINK = "/run/atoll/link"
"""Directory of the executor's socket."""
JOURNAL = "/run/atoll/journal"
OWN_PROCESSES = 8
"""Processes of Atoll beside those of user code, including some that serve file operations."""
EXECUTOR_PROCESSES = 2
"""Processes of Atoll that always exist: the supervisor and the zygote."""
SUPERVISOR_OOM_SCORE = 500
"""Less than that of user code (`executor_config.USER_OOM_SCORE`)."""
KERNEL_THREADS, KERNEL_SHARE = 256, 4
"""
Threads on the host of a runtime with a kernel of its own: for the kernel, and for each process.
"""
MASKED_PATHS = (
    "/sys", "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kallsyms", "/proc/kcore",
    "/proc/keys", "/proc/latency_stats", "/proc/modules", "/proc/sched_debug", "/proc/scsi",
    "/proc/timer_list", "/proc/timer_stats",
)  # fmt: skip
"""Files that describe the host: the engine's defaults and more."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Of an image that sets none."""


@dataclass(frozen=True)
class BaseImage:
    """The image of a container, its interpreter and the runtime."""

    image: str
    """The id: a tag may have moved."""
    python: tuple[str, ...]
    """Command that starts the interpreter."""
    executable: str
    """The interpreter as one program, for `sys.executable`."""
    path: str
    """Value of the environment variable PATH."""
    runtime: str = ""
    """Name of the engine's runtime; its default if empty."""
    own_kernel: bool = False
    """Whether the runtime has a kernel of its own, as gVisor does."""
    mounts: tuple[dict[str, Any], ...] = ()
    """Mounts of an interpreter that is not the image's."""
    volumes: tuple[str, ...] = ()
    """Paths that the image declares as volumes."""


@dataclass(frozen=True)
class ContainerSpec:
    """A container of an instance or of an installation of packages."""

    base: BaseImage
    labels: dict[str, str]
    mounts: tuple[dict[str, Any], ...]
    resources: Resources
    uid: int
    tmp_size: int
    open_files: int
    environment: str | None = None
    """Path of the template's package environment."""
    relays: int = 0
    """Number of relay processes, in addition to all others (`exec_link`)."""


def instance_body(spec: ContainerSpec) -> dict[str, Any]:
    base, own = spec.base, spec.environment or ""
    env = {
        **environment_variables.INSTANCE,
        "PATH": f"{own and f'{own}/bin:'}{base.path}:{INSIDE}/bin",
        "PYTHONPATH": f"{own and f'{own}:'}{INSIDE}/lib",
        "ATOLL_PYTHON": base.executable,
    }
    program = ["-I", "-S", "-B", "-c", BOOT.format(path=EXECUTOR), "-"]
    return _body(spec, WORKSPACE, env, program)


def installation_body(spec: ContainerSpec) -> dict[str, Any]:
    env = {**environment_variables.INSTALLATION, "PATH": spec.base.path}
    program = ["-I", "-S", "-B", install_program.PROGRAM, install_program.STANDARD]
    body = _body(spec, install_program.BUILD, env, program)
    # Its standard streams carry a protocol, which no log needs. It is useless without the process
    # that started it, and ends with it.
    body["HostConfig"] |= {"LogConfig": {"Type": "none"}, "AutoRemove": True}
    return body


def _body(
    spec: ContainerSpec, workdir: str, env: dict[str, str], program: list[str]
) -> dict[str, Any]:
    base, resources = spec.base, spec.resources
    tmpfs = f"rw,exec,nosuid,nodev,mode=1777,size={spec.tmp_size}"
    host: dict[str, Any] = {
        "Mounts": [*base.mounts, *spec.mounts],
        "NetworkMode": "none",
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "ReadonlyRootfs": True,
        "Tmpfs": dict.fromkeys(sorted(_tmpfs_paths(spec)), tmpfs),
        "ShmSize": spec.tmp_size,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "MaskedPaths": list(MASKED_PATHS),
        **limits(resources, relays=spec.relays),
        "OomScoreAdj": SUPERVISOR_OOM_SCORE,
        "Ulimits": [
            {"Name": name.lower(), "Soft": most, "Hard": most}
            for name, most in {**RLIMITS, "NOFILE": spec.open_files}.items()
        ],
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "64k", "max-file": "1"}},
        "RestartPolicy": {"Name": "no"},
    }
    if base.runtime:
        host["Runtime"] = base.runtime
    if base.own_kernel:
        # On the host, that kernel is a program with many threads, which crashes if it gets too few.
        # User code is limited by that kernel, which counts the processes of this container alone.
        limit = resources.max_processes + OWN_PROCESSES
        host["Ulimits"].append({"Name": "nproc", "Soft": limit, "Hard": limit})
        host["PidsLimit"] = KERNEL_THREADS + KERNEL_SHARE * host["PidsLimit"]
    return {
        "Image": base.image,
        "Hostname": "sandbox",
        "User": f"{spec.uid}:{spec.uid}",
        "WorkingDir": workdir,
        "Entrypoint": [*base.python, *program],
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in env.items()],
        "Labels": spec.labels,
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


def _tmpfs_paths(spec: ContainerSpec) -> set[str]:
    """
    Temporary directories, and the paths that the image declares as volumes: in a volume of the
    engine, files could grow without a limit.
    """
    base = spec.base
    mounted = {str(mount["Target"]) for mount in (*base.mounts, *spec.mounts)}
    return {*TEMPORARY, *(posixpath.normpath(path) for path in base.volumes)} - mounted


def limits(resources: Resources, *, relays: int) -> dict[str, Any]:
    """The limits that can be changed while the container runs."""
    return {
        "Memory": resources.memory,
        # Memory and swap together: no swap.
        "MemorySwap": resources.memory,
        "NanoCpus": int(resources.cpu * 1_000_000_000),
        "PidsLimit": resources.max_processes + OWN_PROCESSES + relays,
    }


def bind(source: str, target: str, *, read_only: bool) -> dict[str, Any]:
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": read_only}


def shared_mounts(executor: str, inside: str, packages: str) -> list[dict[str, Any]]:
    """The mounts of all containers of a node."""
    return [
        bind(executor, EXECUTOR, read_only=True),
        bind(inside, INSIDE, read_only=True),
        bind(packages, PACKAGES, read_only=True),
    ]
