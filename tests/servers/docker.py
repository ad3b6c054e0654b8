"""
A Docker engine of the tests' own: dockerd with its containerd, its data, its control groups.

It touches nothing of the machine's network: there is no bridge, so containers have the network
`none`. Data and containers stay over `stop` and `crash`, as they do on a machine; `kill` is the
machine losing its power. The data is in a short place of its own, because the path of a socket is
limited to 107 bytes. The log is in the directory that the test gave.
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
"""The user on the host that root is in containers of an engine with `remap`."""
GVISOR = ("--platform=ptrace", "--network=none")
"""ptrace, because the others want a machine that is not a virtual one, or a newer kernel."""


class Ended(NamedTuple):
    exit_code: int
    output: str


def ask(engine: Path, method: str, path: str, **given: Any) -> httpx.Response:
    """One call of an engine's API; an error is raised with what the engine said."""
    transport = httpx.HTTPTransport(uds=str(engine), verify=False)
    with httpx.Client(transport=transport, base_url="http://docker", timeout=60) as client:
        answer = client.request(method, f"{API}{path}", **given)
    if answer.is_error:
        raise httpx.HTTPStatusError(answer.text, request=answer.request, response=answer)
    return answer


class Dockerd:
    """
    `config` is added to its daemon.json; with `tls` it listens on loopback over TCP too, with
    `remap` users in its containers are those from `REMAPPED` on.
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
        """A descriptor of dockerd's process; none while it is not to run."""
        self._pid = 0

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def tcp_url(self) -> str:
        """To be used with `ca`, `cert` and `key`."""
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
        """How it is reached over TLS, by the names of Atoll's settings."""
        return {
            "url": self.tcp_url,
            "tls_ca": str(self.ca),
            "tls_cert": str(self.cert),
            "tls_key": str(self.key),
        }

    # Its life

    def start(self) -> Self:
        assert self._process is None, "it runs already"
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
        """Let it end as it should, its containers before it, and wait for that."""
        self.resume()
        self._end(signal.SIGTERM)

    def crash(self) -> None:
        """End dockerd and its containerd at once. Containers go on until it starts again."""
        containerd = int((self.place / "exec/containerd/containerd.pid").read_text())
        descriptor = os.pidfd_open(containerd)
        self._end(signal.SIGKILL)
        self._await(descriptor, "containerd")

    def kill(self) -> None:
        """End it at once with all its containers, and wait for that."""
        self._tell("kill")
        self._forget()

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """It stays connected and connections are taken, but it answers nothing."""
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
        assert code == 0, f"something of dockerd stays: {self.log.read_text()[-4000:]}"

    # What it is asked, past Atoll

    def answers(self) -> bool:
        # First by hand: httpx leaves a socket open that cannot be connected.
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(self.socket)) != 0:
                return False
        try:
            return self.ask("GET", "/_ping").text == "OK"
        except httpx.HTTPError:
            return False

    def ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        return ask(self.socket, method, path, **given)

    def import_image(self, archive: Path, reference: str, *changes: str) -> str:
        """An image of a root file system; `changes` are lines of a Dockerfile. Its id."""
        name, _, tag = reference.rpartition(":")
        about = {"fromSrc": "-", "repo": name, "tag": tag, "changes": list(changes)}
        with archive.open("rb") as content:
            self.ask("POST", "/images/create", params=about, content=content)
        return str(self.image(reference)["Id"])

    def image(self, reference: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/images/{reference}/json").json())

    def containers(self, **filters: list[str]) -> list[dict[str, Any]]:
        """All, those that do not run as well; `filters` as in label=["a=b"]."""
        about = {"all": "true", "filters": json.dumps(filters)}
        return list(self.ask("GET", "/containers/json", params=about).json())

    def inspect(self, container: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/containers/{container}/json").json())

    def create(self, image: str, *command: str, runtime: str = "", **host: Any) -> str:
        """A container without network that has not been started; `host` is of its HostConfig."""
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
        """A container from its start to its end, which removes it."""
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
        said = b""
        while rest:
            (length,) = struct.unpack(">xxxxL", rest[:8])
            said, rest = said + rest[8 : 8 + length], rest[8 + length :]
        return said.decode()

    def remove(self, *containers: str) -> None:
        for container in containers:
            self.ask("DELETE", f"/containers/{container}", params={"force": "true", "v": "true"})

    # How it is run

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
            # The other kind would take a systemd.
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
        }
        told = subprocess.run([self._program, "--version"], capture_output=True, check=True)
        version = re.search(rb"version (\d+)", told.stdout)
        if version is not None and int(version[1]) < 23:
            # Without it all engines of a machine have one id. Newer ones keep it in data-root.
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
        """What runs it where other users are lent to one that every machine has."""
        self._config["userns-remap"] = "daemon"
        lent = self.place / "lent"
        lent.write_text(f"daemon:{REMAPPED}:65536\n")
        # Users in containers come by on the way to their root.
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
                    # A Ctrl-C in the terminal is for the tests, which then end it.
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
        assert select.select([self._running], [], [], 60)[0], "dockerd does not end"
        self._forget()

    def _await(self, descriptor: int, what: str) -> None:
        try:
            assert select.select([descriptor], [], [], 60)[0], f"{what} does not end"
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
        assert self._process is not None, "it does not run"
        return self._process
