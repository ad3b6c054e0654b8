"""
Checks what this machine can give its instances, by trying it. `atoll doctor` prints the results.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.drivers.local import forked_start
from atoll.drivers.local.sandbox_host import free_stage
from atoll.drivers.shared import cgroups, disk_images, seccomp
from atoll.drivers.shared.cgroups import node_groups
from atoll.drivers.shared.checks import Check
from atoll.drivers.shared.disk_images import images_problem
from atoll.drivers.shared.volumes.bucket_mounts import FUSE
from atoll.executor.runs import kernel_memory

if TYPE_CHECKING:
    from atoll.settings import LocalSettings


MAPPED_OVERLAYS = (5, 19)
"""The first Linux with overlays on mounts with mapped owners."""
DELEGATING = "systemd-run --user --scope -p Delegate=yes atoll serve"


def layer_problem(directory: Path) -> str | None:
    """Why Debian packages of templates cannot be installed here; None if they can."""
    if os.geteuid() != 0:
        return "only root can install them"
    release = platform.release()
    found = re.match(r"(\d+)\.(\d+)", release)
    if found is not None and (int(found[1]), int(found[2])) < MAPPED_OVERLAYS:
        return f"that needs Linux {'.'.join(map(str, MAPPED_OVERLAYS))} or newer, not {release}"
    return images_problem(directory)


def fork_problem(settings: LocalSettings) -> str | None:
    """Why the settings or the user allow no instances that are forks; None if they do."""
    if os.geteuid() != 0:
        return "only root can move a fork into the control groups and the user of an instance"
    if not settings.fork_server:
        return "local.fork_server is false"
    # The warm interpreter has the executor's byte code, so it is Atoll's own.
    return None if settings.python is None else "local.python is another interpreter"


def checks(settings: LocalSettings, node: Path) -> list[Check]:
    root = os.geteuid() == 0
    groups = node_groups(settings, Path())
    groups.close()  # Finding control groups may make one; a server makes its own.
    result = [_bubblewrap(settings), _namespaces(settings)]
    result.append(
        Check(
            "host uids",
            root,
            "each instance has a host uid of its own"
            if root
            else "instances share your uid; the namespaces alone keep them apart",
            "" if root else "sudo atoll serve",
            requirement="own_uid",
            unprivileged=not root,
        )
    )
    missing = (
        DELEGATING if (settings.cgroup_root / "cgroup.controllers").exists() else "sudo atoll serve"
    )
    for name, fallback in (
        ("memory", "watched every 100 ms and limited per process"),
        ("cpu", "not limited"),
        ("pids", "limited by RLIMIT_NPROC"),
    ):
        requirement = f"cgroup_{name}"
        given = requirement in groups.provides
        result.append(
            Check(
                f"control group: {name}",
                given,
                f"{name} is limited by the kernel" if given else f"{name} is {fallback}",
                "" if given else missing,
                requirement=requirement,
                unprivileged=not (given or root),
            )
        )
    result.append(_socket_buffers(groups, missing))
    problem = images_problem(node)
    images = problem is None
    result.append(
        Check(
            "workspace quota",
            images,
            "enforced by the file system"
            if images
            else "the executor watches it; a fast writer can exceed it for a moment "
            f"(no file system images: {problem})",
            "" if images else _image_fix(),
            requirement="disk_quota",
            unprivileged=not (images or root),
        )
    )
    problem = layer_problem(node)
    result.append(
        Check(
            "Debian packages",
            problem is None,
            "templates can install them"
            if problem is None
            else f"templates cannot install them: {problem}",
            "" if root else "sudo atoll serve",
            unprivileged=not root,
        )
    )
    filtered = seccomp.program() is not None
    result.append(
        Check(
            "seccomp",
            filtered,
            "system calls are filtered"
            if filtered
            else f"no filter is known for {platform.machine()}",
            requirement="seccomp",
        )
    )
    problem = fork_problem(settings) or forked_start.problem(settings.uid_base, free_stage(()))
    result.append(
        Check(
            "fork server",
            problem is None,
            "instances are forks of a warm interpreter"
            if problem is None
            else f"every instance starts an interpreter: {problem}",
        )
    )
    result.append(_bucket_mounts(settings, groups))
    for name, program, package in (("node", "node", "nodejs"), ("bash", "bash", "bash")):
        path = shutil.which(program)
        result.append(
            Check(
                name,
                path is not None,
                path or "not installed",
                "" if path else f"apt-get install {package}",
            )
        )
    return result


def _socket_buffers(groups: cgroups.ControlGroups, fix: str) -> Check:
    name = "socket buffers"
    try:
        kernel_memory.network_sockets()
        kernel_memory.unix_sockets()
    except OSError as error:
        limited = "partly limited by the kernel" if groups.limits_sockets else "not limited"
        detail = f"{limited}; this kernel does not report them to the watcher ({error})"
        return Check(name, False, detail, "modprobe -a inet_diag tcp_diag udp_diag unix_diag")
    except kernel_memory.TooMany:
        pass  # The kernel reports them, which is what matters.
    if not groups.limits_sockets:
        unprivileged = os.geteuid() != 0
        return Check(name, False, "watched every 100 ms", fix, unprivileged=unprivileged)
    return Check(
        name, True, "TCP and UDP are limited by the kernel, netlink is watched every 100 ms"
    )


def _bucket_mounts(settings: LocalSettings, groups: cgroups.ControlGroups) -> Check:
    name = "bucket mounts"
    if os.geteuid() != 0:
        detail = "only root can mount a bucket for others"
        return Check(name, False, detail, "sudo atoll serve", unprivileged=True)
    if shutil.which(settings.s3fs) is None:
        return Check(name, False, f"{settings.s3fs} is not on the PATH", "apt-get install s3fs")
    if not FUSE.exists():
        return Check(name, False, f"{FUSE} does not exist", "modprobe fuse")
    detail = "volumes and workspaces can be in the bucket of the blob store"
    if "cgroup_memory" not in groups.provides:
        detail += "; nothing limits the memory of s3fs"
    return Check(name, True, detail)


def _image_fix() -> str:
    if os.geteuid() != 0:
        return "sudo atoll serve"
    if not (Path(disk_images.MKFS).exists() and Path(disk_images.E2FSCK).exists()):
        return "apt-get install e2fsprogs"
    return "modprobe loop  # in a container: docker run --privileged ..."


def _bubblewrap(settings: LocalSettings) -> Check:
    path = shutil.which(settings.bubblewrap)
    fix = "apt-get install bubblewrap"
    if path is None:
        return Check("bubblewrap", False, f"{settings.bubblewrap} is not on the PATH", fix, True)
    done = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=10, check=False
    )
    return Check("bubblewrap", done.returncode == 0, done.stdout.strip(), fix, True)


def _namespaces(settings: LocalSettings) -> Check:
    """Whether a sandbox can be made as an unprivileged uid."""
    path = shutil.which(settings.bubblewrap)
    if path is None:
        return Check("namespaces", False, "not tried: bubblewrap is missing", "", True)
    command = [
        path,
        "--unshare-all",
        "--ro-bind",
        "/usr",
        "/usr",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
    ]
    for name in ("bin", "lib", "lib64"):
        if Path("/", name).exists():
            command += ["--ro-bind", f"/{name}", f"/{name}"]
    uid = settings.uid_base if os.geteuid() == 0 else None
    done = subprocess.run(
        [*command, "/usr/bin/true"],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
        user=uid,
        group=uid,
        extra_groups=[] if uid is not None else None,
        cwd="/",
    )
    if done.returncode == 0:
        return Check("namespaces", True, "user, PID, mount, network, IPC, UTS", "", True)
    return Check("namespaces", False, done.stderr.strip(), _namespace_fix(), True)


def _namespace_fix() -> str:
    for knob, value in (
        ("kernel.unprivileged_userns_clone", "1"),
        ("kernel.apparmor_restrict_unprivileged_userns", "0"),
    ):
        path = Path("/proc/sys") / knob.replace(".", "/")
        if path.exists() and path.read_text().strip() != value:
            return f"sudo sysctl -w {knob}={value}"
    maximum = Path("/proc/sys/user/max_user_namespaces")
    if maximum.exists() and maximum.read_text().strip() == "0":
        return "sudo sysctl -w user.max_user_namespaces=15000"
    return "docker run --privileged ...  # or allow user namespaces and an unmasked /proc"
