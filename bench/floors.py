"""What the machine itself costs: the same work without Atoll."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.measure import Samples, timed

if TYPE_CHECKING:
    from collections.abc import Iterator

CODE = "print(1)"


def posix_spawn() -> Samples:
    def work() -> None:
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)

    return timed("posix_spawn /bin/true", work, count=500)


def python_under_bubblewrap() -> Samples:
    """A new interpreter under bubblewrap with control group limits, for each execution."""
    groups = _groups()
    join = "".join(f"echo $$ > {group}/cgroup.procs; " for group in groups)
    bubblewrap = [
        "bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev",
        "--tmpfs", "/tmp", os.path.realpath(sys.executable), "-c", CODE,
    ]  # fmt: skip
    command = ["/bin/sh", "-c", f'{join}exec "$@"', "sh", *bubblewrap]

    def work() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    words = f"python under bwrap, {len(groups)} control groups"
    try:
        return timed(words, work, count=40)
    finally:
        for group in groups:
            with contextlib.suppress(OSError):
                group.rmdir()


def _groups() -> list[Path]:
    root, name = Path("/sys/fs/cgroup"), f"atoll-bench-{secrets.token_hex(4)}"
    tops = [root / kind for kind in ("memory", "cpu", "pids")]
    if not all((top / "cgroup.procs").exists() for top in tops):
        tops = [root]
    made = []
    for top in tops:
        if os.access(top, os.W_OK):
            (top / name).mkdir()
            made.append(top / name)
    for group in made:
        for file, value in (
            ("memory.limit_in_bytes", 512 << 20),
            ("memory.max", 512 << 20),
            ("cpu.cfs_quota_us", 100_000),
            ("pids.max", 128),
        ):
            if (group / file).exists():
                (group / file).write_text(str(value))
    return made


def ipykernel() -> Samples | None:
    """A running kernel: an interpreter without isolation, over its own protocol."""
    try:
        from jupyter_client.manager import start_new_kernel
    except ImportError:
        return None
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        return timed(
            "ipykernel execute print(1)",
            lambda: client.execute_interactive(CODE, timeout=10, output_hook=lambda message: None),
            count=100,
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


class _Docker(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("docker")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        self.request(method, path, json.dumps(body or {}), {"Content-Type": "application/json"})
        answer = self.getresponse()
        content = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status} {content[:200]!r}")
        return json.loads(content) if content.startswith((b"{", b"[")) else None


def docker() -> Iterator[Samples]:
    """`docker run` and `docker exec` over the engine's API, where one with an image is there."""
    path = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    if not os.path.exists(path):
        return
    engine = _Docker(path)
    image = os.environ.get("BENCH_DOCKER_IMAGE") or _an_image(engine)
    if image is None:
        return
    python = os.environ.get("BENCH_DOCKER_PYTHON", "python3")
    limits = {"Memory": 512 << 20, "NanoCpus": 10**9, "PidsLimit": 128, "NetworkMode": "none"}

    def run() -> None:
        made = engine.call(
            "POST",
            "/containers/create",
            {"Image": image, "Cmd": [python, "-c", CODE], "HostConfig": limits},
        )
        engine.call("POST", f"/containers/{made['Id']}/start")
        engine.call("POST", f"/containers/{made['Id']}/wait")
        engine.call("DELETE", f"/containers/{made['Id']}?force=1")

    yield timed("docker run python -c print(1)", run, count=10, warm=1)
    body = {"Image": image, "Cmd": ["sleep", "600"], "HostConfig": limits}
    container = engine.call("POST", "/containers/create", body)["Id"]
    engine.call("POST", f"/containers/{container}/start")

    def execute() -> None:
        wanted = {"Cmd": [python, "-c", CODE], "AttachStdout": True}
        made = engine.call("POST", f"/containers/{container}/exec", wanted)
        engine.call("POST", f"/exec/{made['Id']}/start", {"Detach": False})

    try:
        yield timed("docker exec python -c print(1)", execute, count=30, warm=2)
    finally:
        engine.call("DELETE", f"/containers/{container}?force=1")


def _an_image(engine: _Docker) -> str | None:
    for image in engine.call("GET", "/images/json"):
        for tag in image.get("RepoTags") or []:
            if "python" in tag:
                return str(tag)
    return None


def available() -> bool:
    return shutil.which("bwrap") is not None
