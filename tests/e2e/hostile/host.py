"""The host's side of a hostile case: its processes, its disk, its memory, as seen from outside."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import drivers
from tests.host_processes import below, is_fork_server, processes

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

    from tests.harness import Server

MiB = 1024 * 1024


def eventually(
    condition: Callable[[], Any], what: str | Callable[[], str], seconds: float = 60
) -> Any:
    """Poll until `condition` is true; returns its value."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, (
            f"never came: {what if isinstance(what, str) else what()}"
        )
        time.sleep(0.01)  # Interval of the poll: the kernel reports no event.
    return found


def fork_server(server: int) -> int:
    """The pid of the fork server of a server that has started an instance."""
    every = processes()
    (found,) = (
        pid
        for pid, (parent, _, _) in every.items()
        if parent in every and every[parent][0] == server and is_fork_server(pid)
    )
    return found


def resident(pid: int) -> int:
    """Bytes of memory that a process has in use."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak(pid: int) -> int:
    """Most bytes of memory that a process has had in use."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no peak")


def disk_use(directory: Path) -> int:
    """Bytes that a tree takes on the host's disk; as deep as it may be."""
    total = 0
    for _, _, files, fd in os.fwalk(directory, onerror=None):
        for name in files:
            try:
                total += os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


class Box:
    """A session, and what the host sees of it."""

    def __init__(self, server: Server, client: httpx.Client, session: dict[str, Any]) -> None:
        self.server = server
        self.client = client
        self.id: str = session["id"]
        self.url = f"/api/v1/sessions/{self.id}"
        self.files = f"{self.url}/files"

    def submit(self, code: str, **request: Any) -> str:
        """Start something; its execution's id."""
        answer = self.client.post(f"{self.url}/execute", json={"code": code, **request})
        assert answer.status_code == 202, answer.text
        identity: str = answer.json()["execution_id"]
        return identity

    def run(self, code: str, **request: Any) -> dict[str, Any]:
        """Run something to its end; the result."""
        body = {"code": code, "timeout": 20, "wait": 50, **request}
        answer = self.client.post(f"{self.url}/execute", json=body)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = strict_json(answer.text)
        return result

    def result(self, execution: str, wait: float = 50) -> dict[str, Any]:
        answer = self.client.get(f"/api/v1/executions/{execution}/result", params={"wait": wait})
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = strict_json(answer.text)
        return result

    def printed(self, code: str, **request: Any) -> str:
        """What code that must succeed writes."""
        result = self.run(code, **request)
        assert result["status"] == "success", result
        text: str = result["stdout"]
        return text.strip()

    def assert_usable(self) -> None:
        """The session still runs code and keeps files."""
        assert self.printed("print(6 * 7)") == "42"
        assert self.client.put(f"{self.files}/still-here.txt", content=b"yes").status_code == 201
        assert self.client.get(f"{self.files}/still-here.txt").content == b"yes"

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get(self.url).json()
        return found

    @property
    def instance(self) -> str:
        return str(self.describe()["container_id"])

    @property
    def pid_1(self) -> int:
        """The host's pid of the sandbox's PID 1."""
        return int(drivers.handle(self.server.data_dir, self.instance)["child"])

    def processes(self) -> set[int]:
        """The host's pids of what runs in the sandbox, PID 1 not included."""
        return below(self.pid_1)

    def settled(self) -> set[int]:
        """The processes once only those of the executor are left: the zygote and a spare child."""

        def idle() -> set[int]:
            now = self.processes()
            return now if len(now) == 2 else set()

        found: set[int] = eventually(
            idle, lambda: f"two processes in {self.id}, not {self.processes()}"
        )
        return found

    @property
    def workspace(self) -> Path:
        """Where the host keeps the files."""
        return self.server.data_dir / "node" / "workspaces" / self.workspace_name

    @property
    def workspace_name(self) -> str:
        return str(drivers.handle(self.server.data_dir, self.instance)["workspace"])


def strict_json(text: str) -> Any:
    """JSON as other languages read it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)
