"""A node: namespaces of its own with containerd, kubelet and kube-proxy, on one bridge."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from tests.servers import program
from tests.servers.kubernetes import cgroups, cri, node_config, node_init
from tests.servers.kubernetes.network import Network, run
from tests.servers.kubernetes.node_config import CONTAINERD
from tests.servers.kubernetes.pki import Authority
from tests.servers.kubernetes.processes import Process, Processes

_NAMESPACES = ("--mount", "--net", "--pid", "--uts", "--ipc", "--propagation", "private")


class Node:
    """
    One process outside (`unshare`) keeps the node alive: killing it is a loss of power. The disk,
    a directory, survives that.
    """

    def __init__(
        self,
        config: node_config.Node,
        hyperkube: Path,
        network: Network,
        authority: Authority,
        processes: Processes,
    ) -> None:
        self.name = config.name
        self._config = config
        self._network = network
        self._processes = processes
        self._machine: Process | None = None
        node_config.write(config, network, authority)
        kubeconfig = authority.kubeconfig(
            self.name, subject=f"system:node:{self.name}", group="system:nodes"
        )
        self._commands = {
            "containerd": node_config.containerd_command(config),
            "kubelet": node_config.kubelet_command(config, hyperkube, network, kubeconfig),
            "kube-proxy": node_config.proxy_command(config, hyperkube),
        }

    @property
    def address(self) -> str:
        return self._network.node(self._config.index)

    @property
    def kubelet(self) -> Path:
        """The root directory of the kubelet."""
        return self._config.kubelet

    def boot(self, nodes: int) -> None:
        """Start the machine with containerd; `nodes` is how many the cluster has."""
        cgroups.make(Path(self._config.cgroup))
        place = self._config.place
        (place / "control").unlink(missing_ok=True)
        self._machine = self._processes.start(
            self.name, program("unshare", "util-linux"), *_NAMESPACES, "--fork", "--kill-child",
            sys.executable, "-I", "-S", node_init.__file__, self.name, str(place),
        )  # fmt: skip
        self._wait(self._listens, "node")
        self._network.attach(self._config.index, self.pid, range(1, nodes + 1))
        self.start("containerd")

    def install(self, component: str, command: Sequence[str]) -> None:
        """Add a program for `start` and `signal`. A node that boots does not start it."""
        self._commands[component] = list(command)

    def start(self, component: str) -> None:
        """Start containerd, kubelet, kube-proxy, or what was installed."""
        command, log = self._commands[component], str(self._log(component))
        self._ask({"verb": "start", "name": component, "command": command, "log": log})
        if component == "containerd":
            self._wait(self._containerd_answers, component)

    def signal(self, component: str, number: signal.Signals) -> None:
        """Send a signal; with SIGKILL wait for the end."""
        self._ask({"verb": "signal", "name": component, "signal": number})

    def died(self) -> list[Path]:
        """The logs of components that ended without a signal of a test."""
        if self._machine is None or not self._machine.runs:
            return []
        try:
            ended = self._ask({"verb": "list-ended"})
        except OSError:
            # It is starting, or has just been killed.
            return []
        return [self._log(component) for component in ended.split()]

    def import_images(self, archives: Sequence[Path]) -> None:
        for archive in archives:
            self._ctr("images", "import", "--snapshotter", self._config.snapshotter, str(archive))

    def kill(self) -> None:
        """Cut its power: all of its processes die, and its network is gone."""
        self._running.kill()
        self._network.detach(self._config.index)

    def set_connected(self, connected: bool) -> None:
        self._network.set_connected(self._config.index, connected)

    def run(self, *command: str) -> str:
        """Run a short program in its mount, network, PID, UTS and IPC namespaces."""
        options = ("--mount", "--net", "--pid", "--uts", "--ipc")
        return run("nsenter", "--target", str(self.pid), *options, *command)

    @property
    def pid(self) -> int:
        """Of its first process."""
        outside = self._running.pid
        children = Path(f"/proc/{outside}/task/{outside}/children").read_text().split()
        return int(children[0])

    @property
    def _running(self) -> Process:
        assert self._machine is not None, f"node {self.name} was never started"
        return self._machine

    def _ctr(self, *words: str) -> str:
        return self.run("ctr", "--address", CONTAINERD, "--namespace", "k8s.io", *words)

    def _log(self, component: str) -> Path:
        return self._processes.logs / f"{self.name}-{component}.log"

    def _containerd_answers(self) -> bool:
        return cri.answers(Path(f"/proc/{self.pid}/root{CONTAINERD}"))

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self._config.place / "control")) == 0

    def _ask(self, request: dict[str, Any]) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(self._config.place / "control"))
            with connection.makefile("rw") as stream:
                stream.write(json.dumps(request) + "\n")
                stream.flush()
                answer = stream.readline()
                assert answer, f"node {self.name} failed: {self._processes.report()}"
                return answer.strip()

    def _wait(self, ready: Any, what: str) -> None:
        deadline = monotonic() + 60
        while not ready():
            assert self._running.runs, f"{self.name} ended: {self._processes.report()}"
            self._processes.require_alive(self.died())
            assert monotonic() < deadline, f"{what} of {self.name}: {self._processes.report()}"
            sleep(0.02)
