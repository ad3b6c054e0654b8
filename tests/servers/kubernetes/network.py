"""
The network namespace of the tests, and the part of it that each cluster has.

Everything of a cluster, and all that talks to it, runs in a network namespace without a way out,
started by `tests.run` with `prefix()`. A cluster has a bridge there; its number, the first that no
other cluster of this namespace has, decides its addresses.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass

from tests.missing import missing
from tests.servers import program

MAX_CLUSTERS = 16
PREFIX = "kube"
"""Of the names of all interfaces here."""
_ENTER = 'ip link set lo up; exec "$@"'


def prefix() -> tuple[str, ...]:
    """What to put before a command for it to run in a network namespace of its own."""
    return ("unshare", "--net", "sh", "-euc", _ENTER, "sh")


def require_own_namespace() -> None:
    """Fail where a cluster would change the network of this machine."""
    if os.geteuid() != 0:
        missing("a Kubernetes cluster needs root")
    program("ip", "iproute2")
    up = json.loads(run("ip", "-json", "link", "show", "up"))
    others = {name for link in up if not (name := link.get("ifname", "lo")).startswith(PREFIX)} - {
        "lo"
    }
    if others:
        raise AssertionError(
            f"Interfaces {', '.join(sorted(others))} are up: these tests need a network namespace "
            "of their own. Run `make test-kubernetes` or `python -m tests.run tests/kubernetes`."
        )


@dataclass(frozen=True)
class Network:
    """Addresses of one cluster."""

    number: int

    @property
    def bridge(self) -> str:
        return f"{PREFIX}{self.number}"

    @property
    def mac(self) -> str:
        """Of the bridge. Otherwise it has that of a node, and another when that node is lost."""
        return f"02:00:00:00:{self.number:02x}:01"

    @property
    def host(self) -> str:
        """The address of the tests, and of the API server, as nodes and pods see them."""
        return f"10.200.{self.number}.1"

    @property
    def services(self) -> str:
        return f"10.{230 + self.number}.0.0/16"

    @property
    def first_service(self) -> str:
        """The address of the Service `kubernetes`."""
        return f"10.{230 + self.number}.0.1"

    @property
    def pods(self) -> str:
        return f"10.{210 + self.number}.0.0/16"

    def node(self, index: int) -> str:
        return f"10.200.{self.number}.{10 + index}"

    def node_pods(self, index: int) -> str:
        return f"10.{210 + self.number}.{index}.0/24"

    def link(self, index: int) -> str:
        """The end of a node's cable that is in the bridge."""
        return f"{PREFIX}{self.number}n{index}"

    def attach(self, index: int, process: int, others: range) -> None:
        """Connect a node, whose network namespace `process` is in; `others` are all nodes."""
        link, address = self.link(index), self.node(index)
        # The same after each start, as of a real machine: neighbours remember it.
        peer = ("peer", "name", "eth0", "address", f"{self.mac[:-2]}{10 + index:02x}")
        ip("link", "add", link, "type", "veth", *peer, "netns", str(process))
        ip("link", "set", link, "master", self.bridge, "up")
        inside = ("link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up")
        routes = [
            f"route add {self.node_pods(other)} via {self.node(other)}"
            for other in others
            if other != index
        ]
        for line in (*inside, f"route add default via {self.host}", *routes):
            run("nsenter", "--net", "--target", str(process), "ip", *line.split())
        ip("route", "replace", self.node_pods(index), "via", address, "dev", self.bridge)

    def detach(self, index: int) -> None:
        """Remove the cable of a node that is lost: the kernel may not have come to it yet."""
        with suppress(subprocess.CalledProcessError):
            ip("link", "delete", self.link(index))

    def set_connected(self, index: int, connected: bool) -> None:
        ip("link", "set", self.link(index), "up" if connected else "down")

    def remove(self) -> None:
        """With it go the routes over it."""
        ip("link", "delete", self.bridge)


def create() -> Network:
    for number in range(MAX_CLUSTERS):
        network = Network(number)
        try:
            ip("link", "add", network.bridge, "address", network.mac, "type", "bridge")
        except subprocess.CalledProcessError as error:
            if "File exists" not in error.stderr:
                raise
            continue
        ip("addr", "add", f"{network.host}/24", "dev", network.bridge)
        ip("link", "set", network.bridge, "up")
        return network
    raise AssertionError(f"{MAX_CLUSTERS} clusters run already.")


def ip(*words: str) -> None:
    run("ip", *words)


def run(*command: str) -> str:
    """A short program; its error output is part of the exception."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr)
        raise
    return done.stdout
