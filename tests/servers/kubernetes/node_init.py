"""
The first process of a node, in mount, network, PID, UTS and IPC namespaces of the node's own.

Started as `node_init.py NAME DIRECTORY`, it makes the node look like a machine: a host name, /proc,
an empty /run and /var/log. Then it serves requests on the socket `control` in the directory, one
per connection, in JSON: start a program, send it a signal, or list those that ended without one. It
ends never; its end is the node's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# A kubelet writes these, which the whole machine shares: it gets files in their place.
SYSCTLS = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}


KUBELET = Path("/var/lib/kubelet")


def main(name: str, place: Path) -> None:
    socket.sethostname(name)
    _mount("-t", "proc", "proc", "/proc")
    _mount("--make-rshared", "/")
    _mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", "/run")
    # Whatever its root directory is, a kubelet has a socket here.
    KUBELET.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", "mode=0750", "tmpfs", str(KUBELET))
    # Made there, for no file of the machine is changed.
    for sysctl, value in SYSCTLS.items():
        cover = Path("/run/sysctl", Path(sysctl).name)
        cover.parent.mkdir(exist_ok=True)
        cover.write_text(value)
        _mount("--bind", str(cover), f"/proc/sys/{sysctl}")
    (place / "log").mkdir(exist_ok=True)
    _mount("--bind", str(place / "log"), "/var/log")
    signal.signal(signal.SIGCHLD, _reap)
    control = place / "control"
    control.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(control))
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as stream, suppress(BrokenPipeError):
                # A probe sends none.
                if line := stream.readline():
                    stream.write(_serve(json.loads(line)) + "\n")
                    stream.flush()


_programs: dict[str, int] = {}
_STOPS = (signal.SIGSTOP, signal.SIGCONT)


def _serve(request: dict[str, Any]) -> str:
    if request["verb"] == "list-ended":
        return " ".join(name for name, pid in _programs.items() if not _exists(pid))
    name = request["name"]
    if request["verb"] == "start":
        with Path(request["log"]).open("ab") as log:
            started = subprocess.Popen(
                request["command"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        _programs[name] = started.pid
        return "started"
    pid = _programs[name] if request["signal"] in _STOPS else _programs.pop(name, 0)
    if not _exists(pid):
        return "ended"
    if request["signal"] != signal.SIGKILL:
        os.kill(pid, request["signal"])
        return "sent"
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    signal.signal(signal.SIGCHLD, _reap)
    _reap(0, None)
    return "killed"


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def _reap(number: int, frame: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
