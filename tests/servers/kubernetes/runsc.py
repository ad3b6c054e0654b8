"""
gVisor's `runsc` as a runtime of containerd's shim for runc. gVisor has a shim of its own, which
Debian does not package, and which does not start where root lacks CAP_SYS_RESOURCE.

Started as `runsc.py RUNSC WORD...` with what the shim passes to runc. It adds what the shim expects
of a container that shares the sandbox of its pod: a process that ends with the container, and that
starts it with the streams of its creation.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PLATFORM = "--platform=ptrace"
"""Others need a physical machine or a newer version of gVisor."""
KILLED = 137
# Debian's runsc refuses a network namespace that has rmem_default, as only that of the machine had
# with older kernels.
_WITHOUT_SYSCTLS = (
    "unshare", "--mount", "--propagation", "slave",
    "sh", "-euc", 'mount -t tmpfs none /proc/sys/net; exec "$@"', "sh",
)  # fmt: skip


def main(runsc: str, words: list[str]) -> int:
    command = [runsc, PLATFORM, *words]
    verb = next((word for word in words if word in _VERBS), None)
    if verb is None:
        os.execv(runsc, command)
    return _VERBS[verb](command)


def _create(command: list[str]) -> int:
    option = command.index("--bundle")
    spec = json.loads(Path(command[option + 1], "config.json").read_text())
    sandbox = spec["annotations"]["io.kubernetes.cri.sandbox-id"]
    if sandbox == command[-1]:
        os.execv(command[0], command)
    option = command.index("--pid-file")
    _, pid_file = command[option : option + 2]
    del command[option : option + 2]
    if code := subprocess.run(command, check=False).returncode:
        return code
    # By the group of the pid the shim learns that the kernel ended the sandbox for its memory.
    group = Path(spec["linux"]["cgroupsPath"]).parent.relative_to("/") / sandbox
    for top in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        with suppress(OSError):
            Path(top, group, "cgroup.procs").write_text("0")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(_address(command))
        listener.listen()
        if pid := os.fork():
            Path(pid_file).write_text(str(pid))
            return 0
        return _accompany(listener)


def _accompany(listener: socket.socket) -> int:
    """Be the process of a container: start it on request, and return its exit code."""
    connection, _ = listener.accept()
    listener.close()
    with connection, connection.makefile("rw") as stream:
        line = stream.readline()
        if not line:
            return KILLED
        command = json.loads(line)
        code = subprocess.run(command, check=False).returncode
        stream.write(f"{code}\n")
    if code:
        return code
    wait = [*command[: command.index("start")], "wait", command[-1]]
    done = subprocess.run(wait, capture_output=True, check=False)
    # Fails when the sandbox is killed.
    return KILLED if done.returncode else int(json.loads(done.stdout)["exitStatus"])


def _start(command: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        if connection.connect_ex(_address(command)) != 0:
            os.execvp(_WITHOUT_SYSCTLS[0], [*_WITHOUT_SYSCTLS, *command])
        with connection.makefile("rw") as stream:
            stream.write(json.dumps(command) + "\n")
            stream.flush()
            return int(stream.readline() or KILLED)


def _kill(command: list[str]) -> int:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    # In the words of runc, which the shim knows.
    sys.stderr.write("container not running" if "not running" in done.stderr else done.stderr)
    return done.returncode


def _delete(command: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        # Of a container that was never started.
        connection.connect_ex(_address(command))
    os.execv(command[0], command)


def _address(command: list[str]) -> str:
    """Of the process of a container, which is the last word, until that is started."""
    return f"\0runsc-{command[-1]}"


_VERBS: dict[str, Callable[[list[str]], int]] = {
    "create": _create,
    "start": _start,
    "kill": _kill,
    "delete": _delete,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
