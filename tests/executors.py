"""The executor as a separate program, without a driver."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from atoll.drivers.shared import executor_bundle
from atoll.link.client import Link
from atoll.settings import LinkSettings


class RunOutput:
    """Receives the output of a run."""

    def __init__(self) -> None:
        self.log: list[tuple[int, int, bytes]] = []

    def started(self) -> None: ...

    def output(self, sequence: int, channel: int, data: bytes) -> None:
        self.log.append((sequence, channel, data))

    def heartbeat(self) -> None: ...


class Executor:
    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self.path = path
        self.process = process
        self._links: list[Link] = []

    async def connect(self, settings: LinkSettings | None = None) -> Link:
        link = await Link.connect(
            str(self.path), settings or LinkSettings(), timeout=timedelta(seconds=60)
        )
        self._links.append(link)
        return link

    async def disconnect(self) -> None:
        """
        Close all links that a test has left open. The executor has ended, so none has to wait.
        """
        for link in self._links:
            link.close()
        await asyncio.gather(*(link.closed for link in self._links))

    async def connect_released(self) -> Link:
        """The same, when it may run something."""
        link = await self.connect()
        await link.call("release", zygote=link.hello["zygote"])
        return link

    def children(self) -> list[int]:
        """Pids of PID 1 of the namespace, seen from outside."""
        pid = self.process.pid
        return [int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def supervisor(self) -> tuple[int, int]:
        """Resident bytes and open descriptors of PID 1."""
        if os.geteuid() != 0:
            pytest.skip("only root can look into a process that is not dumpable")
        (pid,) = self.children()
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return resident * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, 60)


@contextmanager
def executor(
    bubblewrap: str,
    home: Path,
    *,
    journal: bool = False,
    callback: dict[str, Any] | None = None,
    python: Path | None = None,
    unattended: float | None = None,
) -> Iterator[Executor]:
    """
    Start it in its own PID namespace, with the files and network of this machine. `python` is the
    interpreter of a template; `unattended` is how long it waits for a link, in seconds.
    """
    (home / "workspace").mkdir(exist_ok=True)
    path = home / "link.sock"
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    fds = [listener.fileno()]
    config: dict[str, Any] = {
        "listen_fd": listener.fileno(), "root": str(home / "workspace"),
        "hooks": python is not None, "unattended": unattended,
    }  # fmt: skip
    if journal:
        names = [home / "journal.0", home / "journal.1"]
        config["journal_fds"] = [os.open(name, os.O_RDWR | os.O_CREAT, 0o600) for name in names]
        fds += config["journal_fds"]
    if callback is not None:
        (home / "callback.json").write_text(json.dumps(callback))
        fd = os.open(home / "callback.json", os.O_RDONLY)
        config["callback"] = {"fd": fd, "instance": callback["instance"]}
        fds.append(fd)
    boot = executor_bundle.BOOT.format(path=str(executor_bundle.write(home)))
    process = subprocess.Popen(
        [
            bubblewrap, "--unshare-pid", "--unshare-ipc", "--as-pid-1", "--die-with-parent",
            "--dev-bind", "/", "/",
            "--proc", "/proc", str(python or sys.executable), "-I", "-S", "-c", boot,
            json.dumps(config),
        ],
        pass_fds=fds,
    )  # fmt: skip
    listener.close()
    for fd in fds[1:]:
        os.close(fd)
    try:
        yield Executor(path, process)
    finally:
        process.kill()
        process.wait()


def job(name: str, code: str | None, **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "id": name, "kind": "python", "code": code, "command": None, "event": {}, "stdin": None,
        "args": [], "env": {}, "cwd": "/", "timeout": 30.0, "output_limit": 1 << 20,
        "return_limit": 1 << 20, "artifact_limit": 10, "limits": {}, "watch": {},
    }  # fmt: skip
    return base | fields
