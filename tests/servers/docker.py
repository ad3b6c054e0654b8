"""
A Docker engine for tests: dockerd with a containerd, data and control groups of its own.

It does not change the machine's network: there is no bridge, and containers use the network `none`.
Data and containers survive `stop` and `crash`; `kill` is like a power failure. The data is in a
directory with a short path, because the path of a socket is limited to 107 bytes. The log is in the
directory of the test.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple, Self

import httpx
import trustme

from tests.missing import missing
from tests.servers import free_port, program, reaper
from tests.standstill import stand_still

API = "/v1.41"
REMAPPED = 1_200_000_000
"""Root in containers of an engine with `remap` is this user on the host."""
GVISOR = ("--platform=ptrace", "--network=none")
"""ptrace, because other platforms need a physical machine or a newer kernel."""


class Ended(NamedTuple):
    exit_code: int
    output: str


def ask(engine: Path, method: str, path: str, **options: Any) -> httpx.Response:
    """One request to an engine; the error of a failed one contains the engine's message."""
    transport = httpx.HTTPTransport(uds=str(engine), verify=False)
    with httpx.Client(transport=transport, base_url="http://docker", timeout=60) as client:
        answer = client.request(method, f"{API}{path}", **options)
    if answer.is_error:
        raise httpx.HTTPStatusError(answer.text, request=answer.request, response=answer)
    return answer


class Dockerd:
    """
    `config` is added to its daemon.json. With `tls` it listens on a TCP port of loopback, too; with
    `remap` it maps the users of containers to uids from `REMAPPED` on.
    """

    def __init__(
        self, directory: Path, *, tls: bool = False, remap: bool = False, **config: Any
    ) -> None:
        if os.geteuid() != 0:
            missing("a Docker engine needs root")
        self.log = directory / "dockerd.log"
        self._program = program("dockerd", "docker.io")
        self.place = Path(tempfile.mkdtemp(prefix="atoll-d-"))
        self.socket = self.place / "s"
        self.port = free_port() if tls else None
        self.cgroup = self.place.name
        self._config = self._settings() | config
        if tls:
            self._config |= self._certify()
        self._prefix = self._remap() if remap else []
        (self.place / "daemon.json").write_text(json.dumps(self._config))
        self._reaper: subprocess.Popen[str] | None = None
        self._process: int | None = None
        """A pidfd of dockerd; null while it is stopped."""
        self._pid = 0

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def tcp_url(self) -> str:
        """Use it with `ca`, `cert` and `key`."""
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def ca(self) -> Path:
        return self.place / "ca.pem"

    @property
    def cert(self) -> Path:
        return self.place / "client.pem"

    @property
    def key(self) -> Path:
        return self.place / "client.key"

    @property
    def over_tls(self) -> dict[str, str]:
        """The settings of Atoll for this engine over TLS."""
        return {
            "url": self.tcp_url,
            "tls_ca": str(self.ca),
            "tls_cert": str(self.cert),
            "tls_key": str(self.key),
        }

    # Start and stop

    def start(self) -> Self:
        assert self._process is None, "dockerd is already running"
        self._pid = int(self._tell(f"run {json.dumps(self._command())}"))
        with suppress(ProcessLookupError):
            self._process = os.pidfd_open(self._pid)
        deadline = monotonic() + 60
        while not self.answers():
            if not self._runs() or monotonic() > deadline:
                raise AssertionError(f"dockerd did not start: {self.log.read_text()[-4000:]}")
            sleep(0.02)
        return self

    def stop(self) -> None:
        """Shut down gracefully, containers first, and wait."""
        self.resume()
        self._end(signal.SIGTERM)

    def crash(self) -> None:
        """Kill dockerd and containerd. Containers run until dockerd starts again."""
        containerd = int((self.place / "exec/containerd/containerd.pid").read_text())
        descriptor = os.pidfd_open(containerd)
        self._end(signal.SIGKILL)
        self._await(descriptor, "containerd")

    def kill(self) -> None:
        """Kill it with all its containers, and wait."""
        self._tell("kill")
        self._forget()

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """Let it hang: it accepts connections but does not answer."""
        stand_still(self._pid)

    def resume(self) -> None:
        signal.pidfd_send_signal(self._running, signal.SIGCONT)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self._forget()
        if self._reaper is None:
            shutil.rmtree(self.place)
            return
        ended, self._reaper = self._reaper, None
        with ended:
            assert ended.stdin is not None
            ended.stdin.close()
            code = ended.wait(60)
        assert code == 0, f"dockerd left something behind: {self.log.read_text()[-4000:]}"

    # Requests

    def answers(self) -> bool:
        # Not with httpx alone: it leaks a socket if it cannot connect.
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(self.socket)) != 0:
                return False
        try:
            return self.ask("GET", "/_ping").text == "OK"
        except httpx.HTTPError:
            return False

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        return ask(self.socket, method, path, **options)

    def import_image(self, archive: Path, reference: str, *changes: str) -> str:
        """Import a root file system; `changes` are lines of a Dockerfile. Returns the image id."""
        name, _, tag = reference.rpartition(":")
        about = {"fromSrc": "-", "repo": name, "tag": tag, "changes": list(changes)}
        with archive.open("rb") as content:
            self.ask("POST", "/images/create", params=about, content=content)
        return str(self.image(reference)["Id"])

    def image(self, reference: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/images/{reference}/json").json())

    def containers(self, **filters: list[str]) -> list[dict[str, Any]]:
        """All containers, running or not; `filters` as in label=["a=b"]."""
        about = {"all": "true", "filters": json.dumps(filters)}
        return list(self.ask("GET", "/containers/json", params=about).json())

    def inspect(self, container: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/containers/{container}/json").json())

    def create(self, image: str, *command: str, runtime: str = "", **host: Any) -> str:
        """Create a container without network; `host` is added to its HostConfig."""
        about = {
            "Image": image,
            "Cmd": list(command),
            "HostConfig": {"NetworkMode": "none", "Runtime": runtime} | host,
        }
        return str(self.ask("POST", "/containers/create", json=about).json()["Id"])

    def begin(self, image: str, *command: str, runtime: str = "", **host: Any) -> str:
        container = self.create(image, *command, runtime=runtime, **host)
        self.ask("POST", f"/containers/{container}/start")
        return container

    def run(self, image: str, *command: str, runtime: str = "", **host: Any) -> Ended:
        """Run a container until it ends, and remove it."""
        container = self.create(image, *command, runtime=runtime, **host)
        try:
            self.ask("POST", f"/containers/{container}/start")
            code = int(self.ask("POST", f"/containers/{container}/wait").json()["StatusCode"])
            return Ended(code, self.logs(container))
        finally:
            self.remove(container)

    def logs(self, container: str) -> str:
        about = {"stdout": "true", "stderr": "true"}
        rest = self.ask("GET", f"/containers/{container}/logs", params=about).content
        output = b""
        while rest:
            (length,) = struct.unpack(">xxxxL", rest[:8])
            output, rest = output + rest[8 : 8 + length], rest[8 + length :]
        return output.decode()

    def remove(self, *containers: str) -> None:
        for container in containers:
            self.ask("DELETE", f"/containers/{container}", params={"force": "true", "v": "true"})

    # Configuration and processes

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "data-root": str(self.place / "data"),
            "exec-root": str(self.place / "exec"),
            "pidfile": str(self.place / "pid"),
            "bridge": "none",
            "iptables": False,
            "ip6tables": False,
            "ip-forward": False,
            "ip-masq": False,
            "userland-proxy": False,
            "cgroup-parent": f"/{self.cgroup}",
            # The default one needs systemd.
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
        }
        reported = subprocess.run([self._program, "--version"], capture_output=True, check=True)
        version = re.search(rb"version (\d+)", reported.stdout)
        if version is not None and int(version[1]) < 23:
            # Otherwise all engines of a machine have one id. Newer ones store it in data-root.
            settings["deprecated-key-path"] = str(self.place / "key.json")
        gvisor = shutil.which("runsc")
        if gvisor is not None:
            settings["runtimes"] = {"runsc": {"path": gvisor, "runtimeArgs": list(GVISOR)}}
        return settings

    def _certify(self) -> dict[str, Any]:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.ca)
        server = authority.issue_cert("127.0.0.1")
        server.cert_chain_pems[0].write_to_path(self.place / "server.pem")
        server.private_key_pem.write_to_path(self.place / "server.key")
        client = authority.issue_cert("client.atoll.test")
        client.cert_chain_pems[0].write_to_path(self.cert)
        client.private_key_pem.write_to_path(self.key)
        return {
            "tlsverify": True,
            "tlscacert": str(self.ca),
            "tlscert": str(self.place / "server.pem"),
            "tlskey": str(self.place / "server.key"),
        }

    def _command(self) -> list[str]:
        hosts = [self.url] if self.port is None else [self.url, self.tcp_url]
        listen = [option for host in hosts for option in ("--host", host)]
        words = [self._program, "--config-file", str(self.place / "daemon.json"), *listen]
        return [*self._prefix, *words]

    def _remap(self) -> list[str]:
        """Command prefix that runs dockerd with subordinate uids for a user of every machine."""
        self._config["userns-remap"] = "daemon"
        lent = self.place / "lent"
        lent.write_text(f"daemon:{REMAPPED}:65536\n")
        # Mapped users must be able to reach their root file system.
        self.place.chmod(0o711)
        see = f"for name in subuid subgid; do mount --bind {lent} /etc/$name; done"
        return [
            "unshare", "--mount", "--propagation", "slave",
            "sh", "-euc", f'{see}; exec "$@"', "sh",
        ]  # fmt: skip

    def _tell(self, line: str) -> str:
        if self._reaper is None:
            with self.log.open("ab") as log:
                self._reaper = subprocess.Popen(
                    [sys.executable, "-I", "-S", reaper.__file__, str(self.place), self.cgroup],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    # Ctrl-C in the terminal must reach only the tests, which then stop it.
                    start_new_session=True,
                )
        assert self._reaper.stdin is not None
        assert self._reaper.stdout is not None
        self._reaper.stdin.write(f"{line}\n")
        self._reaper.stdin.flush()
        answer = self._reaper.stdout.readline()
        assert answer, f"the reaper failed: {self.log.read_text()[-4000:]}"
        return answer

    def _end(self, how: signal.Signals) -> None:
        signal.pidfd_send_signal(self._running, how)
        assert select.select([self._running], [], [], 60)[0], "dockerd did not end"
        self._forget()

    def _await(self, descriptor: int, what: str) -> None:
        try:
            assert select.select([descriptor], [], [], 60)[0], f"{what} did not end"
        finally:
            os.close(descriptor)

    def _runs(self) -> bool:
        return self._process is not None and not select.select([self._process], [], [], 0)[0]

    def _forget(self) -> None:
        if self._process is not None:
            os.close(self._process)
            self._process = None

    @property
    def _running(self) -> int:
        assert self._process is not None, "dockerd is not running"
        return self._process
