"""
Installs Debian packages on a root file system; one process for each layer.

It runs as root and starts a sandbox in a user namespace: its uids 0 to 65,535 are unprivileged uids
of the host, to which the files of the base are mapped. Files are written to a file system image of
limited size, and copied to the layer's directory on success. The sandbox has no network but its own
loopback; a socket that listens there is passed to the process that started this one.

All mounts are in a namespace of this process and end with it. It kills its sandbox and exits when
its standard input is closed, which also happens when its owner is killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from typing import Any, NoReturn

from atoll.drivers.local import sandbox_start
from atoll.drivers.shared import mount_syscalls
from atoll.drivers.shared.mount_syscalls import libc, mount

PORT = 3142
"""Port on the sandbox's loopback at which the package mirror is reached."""
UIDS = 65_536
SCRATCH = "/tmp/atoll"
"""Directory in the sandbox for files that are not part of the layer."""
SECCOMP_FD = 4
UNUSABLE = 3
"""Exit status if the sandbox could not be made; the reason is on standard error."""
NOT_COPIED = 4
"""Exit status if the layer was built and could not be copied."""

CAPABILITIES = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID",
    "CAP_SETUID",
)  # fmt: skip
"""Capabilities in the user namespace that dpkg needs to install files."""
ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
    "APT_CONFIG": f"{SCRATCH}/apt.conf",
}

_CLONE_NEWUSER, _CLONE_NEWNET = 0x1000_0000, 0x4000_0000
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
"""The same numbers on all architectures."""
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC, _MOVE_MOUNT_F_EMPTY_PATH = 1, 0x80000, 4
_MOUNT_ATTR_IDMAP = 0x0010_0000
_MS_NOSUID, _MS_NODEV, _MS_BIND = 2, 4, 4096
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def _call(number: int, what: str, *arguments: Any) -> int:
    libc.syscall.restype = ctypes.c_long
    result: int = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def _user_namespace(first: int) -> int:
    """A descriptor of a new one, whose uids and gids are `first` and those after it."""
    ready, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        failed = libc.unshare(_CLONE_NEWUSER)
        os.write(write, b"n" if failed else b"y")
        signal.pause()
        os._exit(0)
    try:
        if os.read(ready, 1) != b"y":
            raise OSError("no user namespace can be made")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(f"0 {first} {UIDS}")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(write)


def _mount_mapped(source: str, target: str, namespace: int) -> None:
    """The directory, with the namespace's uid 0 as the owner of what root owns."""
    tree = _call(
        _OPEN_TREE, f"opening {source}", _AT_FDCWD, os.fsencode(source),
        ctypes.c_uint(_OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC),
    )  # fmt: skip
    attributes = struct.pack("=4Q", _MOUNT_ATTR_IDMAP, 0, 0, namespace)
    _call(
        _MOUNT_SETATTR, f"mapping the owners of {source}", tree, b"",
        ctypes.c_uint(_AT_EMPTY_PATH), attributes, ctypes.c_size_t(len(attributes)),
    )  # fmt: skip
    _call(
        _MOVE_MOUNT, f"mounting {source}", tree, b"", _AT_FDCWD, os.fsencode(target),
        ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH),
    )  # fmt: skip
    os.close(tree)


def _prepare(request: dict[str, Any], namespace: int) -> str:
    """Mount the base, the layers and the new layer as one file system; returns where."""
    stage, first = request["stage"], request["uid"]
    sandbox_start.mount_stage(stage)
    image = os.path.join(stage, "image")
    os.mkdir(image)
    mount_syscalls.mount_image(request["image"], image)
    for name, mode in (("upper", 0o755), ("work", 0o755), ("scratch", 0o755)):
        os.mkdir(os.path.join(image, name))
        os.chmod(os.path.join(image, name), mode)
    for name in ("upper", "scratch"):
        os.chown(os.path.join(image, name), first, first)
    scratch = os.path.join(image, "scratch")
    for name, text in request["files"].items():
        with open(os.path.join(scratch, name), "x") as file:
            file.write(text)
    for name in ("lists/partial", "cache/archives/partial"):
        os.makedirs(os.path.join(scratch, name))
    for path, directories, files in os.walk(scratch):
        for name in (*directories, *files):
            os.chown(os.path.join(path, name), first, first)
    lowers = []
    for number, directory in enumerate(request["layers"]):
        lowers.append(os.path.join(stage, f"layer{number}"))
        os.mkdir(lowers[-1])
        mount(directory, lowers[-1], None, _MS_BIND)
    lowers.append(os.path.join(stage, "base"))
    os.mkdir(lowers[-1])
    _mount_mapped(request["base"], lowers[-1], namespace)
    root = os.path.join(stage, sandbox_start.ROOT)
    os.mkdir(root)
    options = (
        f"lowerdir={':'.join(lowers)},upperdir={image}/upper,workdir={image}/work,"
        # Otherwise the layer would refer to the layers below.
        "redirect_dir=off,metacopy=off,index=off"
    )
    mount("overlay", root, "overlay", _MS_NOSUID | _MS_NODEV, options)
    return root


def _own_network() -> socket.socket:
    """Enter a network namespace; returns a socket that listens on its loopback."""
    mount_syscalls.check(libc.unshare(_CLONE_NEWNET), "making a network namespace")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", PORT))
    listener.listen(64)
    return listener


def arguments(request: dict[str, Any], root: str) -> list[str]:
    """The command of bubblewrap."""
    argv = [
        request["bubblewrap"],
        "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
        "--hostname", "build",
        "--cap-drop", "ALL",
        *(word for name in CAPABILITIES for word in ("--cap-add", name)),
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        *(word for name, value in ENV.items() for word in ("--setenv", name, value)),
        "--bind", root, "/",
        "--proc", "/proc",
    ]  # fmt: skip
    for path in request["hidden"]:
        if path.endswith("/"):
            argv += ["--perms", "0555", "--size", "4096", "--tmpfs", path, "--remount-ro", path]
        else:
            argv += ["--ro-bind", "/dev/null", path]
    if request["seccomp"]:
        argv += ["--seccomp", str(SECCOMP_FD)]
    return [
        *argv,
        "--dev", "/dev",
        "--remount-ro", "/dev",
        "--perms", "1777", "--size", str(request["tmp_size"]), "--tmpfs", "/tmp",
        "--perms", "0755", "--size", str(request["tmp_size"]), "--tmpfs", "/run",
        "--bind", f"{request['stage']}/image/scratch", SCRATCH,
        "--chdir", "/",
        "/bin/sh", "-c", request["script"], "sh", *request["packages"],
    ]  # fmt: skip


def _become(request: dict[str, Any], root: str, namespace: int) -> NoReturn:
    """Replace this process, a fork, with bubblewrap."""
    argv = arguments(request, root)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(1, 2)
    if request["seccomp"]:
        program = os.open(request["seccomp"], os.O_RDONLY | os.O_CLOEXEC)
        # Through a high number: dup2 to the same number would keep close-on-exec.
        high = fcntl.fcntl(program, fcntl.F_DUPFD_CLOEXEC, 100)
        os.dup2(high, SECCOMP_FD, inheritable=True)
    os.closerange(SECCOMP_FD + 1 if request["seccomp"] else 3, namespace)
    os.chdir("/")
    mount_syscalls.check(libc.setns(namespace, _CLONE_NEWUSER), "entering the user namespace")
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.execve(argv[0], argv, {"PATH": "/usr/bin:/bin"})


def _run(request: dict[str, Any], root: str, namespace: int) -> int:
    """Run the sandbox; returns its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            _become(request, root, namespace)
        except BaseException as error:  # noqa: BLE001 - reported to the owner; the process ends here
            os.write(1, f"{error}\n".encode())
        finally:
            os._exit(UNUSABLE)
    child = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(child, select.POLLIN)
    poll.register(0, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if child in ready:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not os.read(0, 1):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            sys.exit(1)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    request = json.loads(sys.stdin.buffer.readline())
    try:
        namespace = _user_namespace(request["uid"])
        root = _prepare(request, namespace)
        listener = _own_network()
        # Its own address space is all that the others of this uid could get at.
        socket.send_fds(control, [b"listening"], [listener.fileno()])
        listener.close()
        # To a high number: lower ones are closed before the sandbox starts.
        high = fcntl.fcntl(namespace, fcntl.F_DUPFD_CLOEXEC, 200)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(UNUSABLE)
    control.close()
    status = _run(request, root, high)
    if status != 0:
        sys.exit(1)
    copy = ["cp", "-a", f"{request['stage']}/image/upper", request["target"]]
    try:
        subprocess.run(copy, check=True, stdin=subprocess.DEVNULL, timeout=request["copy_timeout"])
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(NOT_COPIED)


if __name__ == "__main__":
    main()
