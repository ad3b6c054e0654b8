"""
`make bench-peers`: Atoll beside other ways to run code, in turns.

A Docker engine is started as the tests do, with an image made from this machine's programs; nothing
is pulled. What is in a package index is installed into a temporary virtual environment and runs in
a process of its own. What cannot be had is reported as missing. The peers differ in what they do:

    docker          a container for each `docker run`, a new interpreter for each `docker exec`
    ipykernel       one interpreter that keeps its state; no isolation, no limits, no records
    kernel gateway  the same behind HTTP and WebSockets, as in E2B's code interpreter
    llm-sandbox     containers of that engine, a new interpreter for each execution
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
from tests.servers import free_port
from tests.servers.docker import Dockerd
from tests.servers.images import PYTHON, make_archives

from bench import goals
from bench.__main__ import create, delete, run, wait_for_pool
from bench.report import Report, Way, parser
from bench.server import Server

if TYPE_CHECKING:
    from bench.client import Client

CODE = "print(1)"
POOL = 2
IMAGE = "bench/python:1"
LIMITS = {"Memory": 512 << 20, "NanoCpus": 10**9, "PidsLimit": 128, "NetworkMode": "none"}
PACKAGES = {
    "ipykernel": ["ipykernel", "jupyter_client"],
    "kernel gateway": ["jupyter_kernel_gateway", "ipykernel", "websockets"],
    "llm-sandbox": ["llm-sandbox[docker]"],
}
E2B = "its server is in no package index; its client is, but needs an account"
WORKER = """
import json, os, subprocess, sys, time, urllib.request, uuid

class Kernel:
    def start(self):
        from jupyter_client.manager import start_new_kernel
        self.manager, self.client = start_new_kernel(kernel_name="python3")
    def run(self):
        self.printed = ""
        self.client.execute_interactive("print(1)", timeout=30, output_hook=self.collect)
        assert self.printed == "1\\n", self.printed
    def collect(self, message):
        self.printed += message["content"].get("text", "")
    def stop(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

class Gateway:
    def __init__(self, port):
        self.address = f"127.0.0.1:{port}"
        self.server = subprocess.Popen(
            [sys.executable, "-m", "kernel_gateway", "--KernelGatewayApp.ip=127.0.0.1",
             f"--KernelGatewayApp.port={port}"], stderr=subprocess.DEVNULL)
        while True:
            try:
                self.call("GET", "/api")
                break
            except OSError:
                time.sleep(0.1)
    def call(self, method, path, body=None):
        request = urllib.request.Request(f"http://{self.address}{path}", body, method=method)
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read() or b"null")
    def start(self):
        from websockets.sync.client import connect
        self.id = self.call("POST", "/api/kernels", b"{}")["id"]
        self.socket = connect(
            f"ws://{self.address}/api/kernels/{self.id}/channels").__enter__()
    def run(self):
        id, printed = uuid.uuid4().hex, ""
        self.socket.send(json.dumps({
            "header": {"msg_id": id, "msg_type": "execute_request", "session": "bench",
                       "username": "", "version": "5.3"},
            "parent_header": {}, "metadata": {}, "channel": "shell",
            "content": {"code": "print(1)", "silent": False, "store_history": False,
                        "user_expressions": {}, "allow_stdin": False},
        }))
        left = {"reply", "idle"}
        while left:
            message = json.loads(self.socket.recv(timeout=30))
            if message["parent_header"].get("msg_id") == id:
                printed += message["content"].get("text", "")
                left.discard(message["content"].get("execution_state"))
                left.discard(message["msg_type"].removeprefix("execute_"))
        assert printed == "1\\n", printed
    def stop(self):
        self.socket.close()
        self.call("DELETE", f"/api/kernels/{self.id}")
    def close(self):
        self.server.terminate()
        self.server.wait()

class Sandbox:
    def __init__(self, url, image, limits):
        import docker
        self.options = {
            "client": docker.DockerClient(base_url=url), "image": image, "lang": "python",
            "skip_environment_setup": True, "runtime_configs": json.loads(limits)}
    def start(self):
        from llm_sandbox import SandboxSession
        self.session = SandboxSession(**self.options)
        self.session.open()
    def run(self):
        done = self.session.run("print(1)")
        assert done.stdout == "1\\n", done
    def stop(self):
        self.session.close()

peer = {"ipykernel": Kernel, "kernel gateway": Gateway, "llm-sandbox": Sandbox}[sys.argv[1]](
    *sys.argv[2:])
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for verb in sys.stdin:
    getattr(peer, verb.strip())()
    print("done", file=answers, flush=True)
getattr(peer, "close", lambda: None)()
"""


class Peer:
    """A process that does what it is asked for: start, run, stop."""

    def __init__(self, python: Path, name: str, *arguments: str) -> None:
        self._command = [str(python), "-c", WORKER, name, *arguments]
        self.name = name
        self.started = False

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def do(self, *verbs: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for verb in verbs:
            self._process.stdin.write(f"{verb}\n")
            self._process.stdin.flush()
            if self._process.stdout.readline() != "done\n":
                raise RuntimeError(f"{self.name} cannot {verb}")
            self.started = verb != "stop"


class Engine(http.client.HTTPConnection):
    """One connection to a Docker engine, so that no client's start is timed."""

    def __init__(self, path: Path) -> None:
        super().__init__("docker")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))

    def call(self, method: str, path: str, body: Any = None) -> bytes:
        self.request(method, path, json.dumps(body or {}), {"Content-Type": "application/json"})
        answer = self.getresponse()
        content = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status} {content[:200]!r}")
        return content

    def start(self, *command: str) -> str:
        body = {"Image": IMAGE, "Cmd": command, "HostConfig": LIMITS}
        container = str(json.loads(self.call("POST", "/containers/create", body))["Id"])
        self.call("POST", f"/containers/{container}/start")
        return container

    def remove(self, container: str) -> None:
        self.call("DELETE", f"/containers/{container}?force=1")

    def run(self) -> str:
        container = self.start("python", "-c", CODE)
        self.call("POST", f"/containers/{container}/wait")
        output = self.call("GET", f"/containers/{container}/logs?stdout=1")
        assert b"1\n" in output
        return container

    def execute(self, container: str) -> None:
        wanted = {"Cmd": ["python", "-c", CODE], "AttachStdout": True}
        made = json.loads(self.call("POST", f"/containers/{container}/exec", wanted))
        assert b"1\n" in self.call("POST", f"/exec/{made['Id']}/start", {"Detach": False})


class Peers:
    """What of them can be had on this machine."""

    def __init__(self, report: Report, stack: ExitStack, place: Path) -> None:
        self.engine: Engine | None = None
        self.others: list[Peer] = []
        report.section("peers")
        url = self._start_engine(report, stack, place)
        self._install(report, stack, place, url)
        report.skip("E2B code interpreter", E2B)

    def _start_engine(self, report: Report, stack: ExitStack, place: Path) -> str | None:
        try:
            docker = stack.enter_context(Dockerd(place))
        except pytest.skip.Exception as reason:
            report.skip("docker", str(reason))
            return None
        make_archives(place).load(docker)
        # Some ask for "python".
        container = docker.begin(PYTHON, "ln", "-s", "python3", "/usr/local/bin/python")
        docker.ask("POST", f"/containers/{container}/wait")
        repo, tag = IMAGE.split(":")
        about = {"container": container, "repo": repo, "tag": tag, "changes": 'CMD ["bash"]'}
        docker.ask("POST", "/commit", params=about)
        docker.remove(container)
        self.engine = Engine(docker.socket)
        return docker.url

    def _install(self, report: Report, stack: ExitStack, place: Path, url: str | None) -> None:
        uv, python = Path(sys.executable).with_name("uv"), place / "venv/bin/python"
        subprocess.run([uv, "venv", "--quiet", place / "venv"], check=True)
        limits = {
            "mem_limit": "512m",
            "nano_cpus": 10**9,
            "pids_limit": 128,
            "network_mode": "none",
        }
        arguments = {
            "kernel gateway": [str(free_port())],
            "llm-sandbox": [url or "", IMAGE, json.dumps(limits)],
        }
        for name, packages in PACKAGES.items():
            install: list[str | Path] = [
                uv,
                "pip",
                "install",
                "--quiet",
                "--python",
                python,
                *packages,
            ]
            if name == "llm-sandbox" and url is None:
                report.skip(name, "it needs a Docker engine")
            elif subprocess.run(install, check=False).returncode:
                report.skip(name, "it cannot be installed from the package index")
            else:
                peer = Peer(python, name, *arguments.get(name, []))
                self.others.append(stack.enter_context(peer))


def executes(report: Report, peers: Peers, server: Server, rounds: int) -> None:
    report.section("execute print(1) in what runs already")
    client = server.client()
    session = create(client)
    ways = [Way("atoll", partial(run, client, session, CODE), ours=True)]
    container = ""
    if peers.engine is not None:
        container = peers.engine.start("sleep", "86400")
        ways.append(Way("docker exec", partial(peers.engine.execute, container)))
    for peer in peers.others:
        peer.do("start")
        ways.append(Way(peer.name, partial(peer.do, "run")))
    for way in ways * 3:
        way.work()
    found = report.turns(ways, rounds, sync=False)
    for peer in peers.others:
        peer.do("stop")
    if peers.engine is not None:
        peers.engine.remove(container)
        report.goal(goals.DOCKER_EXEC, found["docker exec"].p50 / found["atoll"].p50)
    delete(client, session)


def starts(report: Report, peers: Peers, server: Server, rounds: int) -> None:
    """What was started is removed before the next turn, which is not timed."""
    report.section("start, until print(1) has been executed")
    client = server.client()
    ways = [
        _session(client, "atoll, from the pool"),
        # A disk of its own: no instance of the pool has it.
        _session(client, "atoll, without a pool", disk="512Mi"),
    ]
    if peers.engine is not None:
        ways.append(_container(peers.engine))
    ways += [_process(peer) for peer in peers.others]
    report.turns(ways, rounds, sync=False)
    for way in ways:
        way.ready()


def _session(client: Client, name: str, **body: object) -> Way:
    made: list[str] = []

    def start() -> None:
        made.append(create(client, **body))
        run(client, made[0], CODE)

    def remove() -> None:
        if made:
            delete(client, made.pop())
        wait_for_pool(client, "python", POOL)

    return Way(name, start, remove, ours=True)


def _container(engine: Engine) -> Way:
    made: list[str] = []

    def remove() -> None:
        if made:
            engine.remove(made.pop())

    return Way("docker run", lambda: made.append(engine.run()), remove)


def _process(peer: Peer) -> Way:
    def remove() -> None:
        if peer.started:
            peer.do("stop")

    return Way(peer.name, partial(peer.do, "start", "run"), remove)


def main() -> None:
    options = parser("peers", __doc__)
    options.add_argument("--executions", type=int, default=100)
    options.add_argument("--rounds", type=int, default=10, help="of starts")
    given = options.parse_args()
    with (
        Report("peers", given.json) as report,
        tempfile.TemporaryDirectory(prefix="atoll-bench-") as place,
        ExitStack() as stack,
    ):
        peers = Peers(report, stack, Path(place))
        size = {"ATOLL_POOL__SIZE": str(POOL), "ATOLL_POOL__MAX_SIZE": str(POOL)}
        server = stack.enter_context(Server(**size))
        wait_for_pool(server.client(), "python", POOL)
        executes(report, peers, server, given.executions)
        starts(report, peers, server, given.rounds)


if __name__ == "__main__":
    main()
