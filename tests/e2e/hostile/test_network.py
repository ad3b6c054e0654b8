"""Sandboxes have no network. Listeners on the host, in the test itself, receive nothing."""

from __future__ import annotations

import secrets
import socket
import threading
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box

pytestmark = [pytest.mark.every_driver, pytest.mark.quick]


class Listener:
    """Sockets of the host that record every client."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.name = f"atoll-{secrets.token_hex(8)}"
        self.tcp = socket.create_server(("0.0.0.0", 0))
        self.tcp6 = socket.create_server(("::1", 0), family=socket.AF_INET6)
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("0.0.0.0", 0))
        self.abstract = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.abstract.bind(f"\0{self.name}")
        self.abstract.listen()
        self._sockets = (self.tcp, self.tcp6, self.udp, self.abstract)
        for kind in ("tcp", "tcp6", "abstract"):
            threading.Thread(target=self._accept, args=(kind,), daemon=True).start()
        threading.Thread(target=self._receive, daemon=True).start()

    def _accept(self, kind: str) -> None:
        while True:
            try:
                connection, _ = getattr(self, kind).accept()
            except OSError:
                return
            self.received.append(kind)
            connection.close()

    def _receive(self) -> None:
        while True:
            try:
                self.udp.recvfrom(64)
            except OSError:
                return
            self.received.append("udp")

    def close(self) -> None:
        for listener in self._sockets:
            listener.shutdown(socket.SHUT_RDWR) if listener is not self.udp else None
            listener.close()


@pytest.fixture(scope="module")
def host_listener() -> Iterator[Listener]:
    found = Listener()
    yield found
    found.close()


def addresses() -> list[str]:
    """Those of the host, as far as it knows them itself."""
    own = {item[4][0] for item in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    return sorted({"127.0.0.1", "127.0.1.1", *map(str, own)})


def test_nothing_on_the_host_can_be_connected_to(
    target: Target, shared: Box, host_listener: Listener
) -> None:
    ports = [host_listener.tcp.getsockname()[1], int(target.server.url.rpartition(":")[2]), 22, 53]
    code = f"""
import socket
elsewhere = ["169.254.169.254", "10.0.0.1", "192.0.2.1", "0.0.0.0", "255.255.255.255"]
for address in {addresses()!r} + elsewhere:
    for port in {ports!r}:
        try:
            socket.create_connection((address, port), timeout=2)
            print("connected", address, port)
        except OSError as error:
            pass
for address in ("::1", "fe80::1", "2001:db8::1", "fd00:ec2::254"):
    try:
        socket.create_connection((address, {host_listener.tcp6.getsockname()[1]}), timeout=2)
        print("connected", address)
    except OSError:
        pass
"""
    assert shared.printed(code) == ""
    assert host_listener.received == []


def test_no_datagram_leaves(shared: Box, host_listener: Listener) -> None:
    code = f"""
import socket
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
for address in {addresses()!r} + ["169.254.169.254", "192.0.2.1", "255.255.255.255", "224.0.0.1"]:
    try:
        sender.sendto(b"x", (address, {host_listener.udp.getsockname()[1]}))
        print("sent", address) if not address.startswith("127.") else None
    except OSError:
        pass
"""
    assert shared.printed(code) == ""
    assert host_listener.received == []


def test_abstract_sockets_of_the_host_are_unreachable(shared: Box, host_listener: Listener) -> None:
    code = f"""
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    for name in ("\\0{host_listener.name}", "\\0/tmp/.X11-unix/X0", "\\0dbus"):
        try:
            socket.socket(socket.AF_UNIX, kind).connect(name)
            print("connected", name)
        except OSError:
            pass
print(open("/proc/net/unix").read().count("{host_listener.name}"))
"""
    assert shared.printed(code) == "0"
    assert host_listener.received == []


def test_loopback_is_the_only_interface_and_no_route_exists(shared: Box) -> None:
    code = """
import socket
print([name for _, name in socket.if_nameindex()])
print(len(open("/proc/net/route").read().splitlines()) - 1)
"""
    assert shared.printed(code) == "['lo']\n0"


def test_names_are_not_resolved(shared: Box) -> None:
    code = """
import socket
for name in ("example.com", "metadata.google.internal", "localhost.localdomain"):
    try:
        print(socket.getaddrinfo(name, 80))
    except OSError:
        pass
"""
    assert shared.printed(code) == ""


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        (40, 1), (17, 3), (38, 5), (15, 3), (44, 3), (31, 3), (29, 3), (5, 2), (30, 1), (43, 1),
        (2, 3), (10, 3), (39, 1), (21, 5), (45, 2), (33, 5), (9, 5), (18, 3),
    ],
    ids=["vsock", "packet", "alg", "key", "xdp", "bluetooth", "can", "appletalk", "tipc", "smc",
         "raw ip", "raw ipv6", "nfc", "rds", "mctp", "rxrpc", "x25", "llc"],
)  # fmt: skip
def test_unusual_kinds_of_sockets_are_refused(shared: Box, family: int, kind: int) -> None:
    code = f"""
import socket
try:
    socket.socket({family}, {kind})
    print("made")
except OSError as error:
    print("refused")
"""
    assert shared.printed(code) == "refused"


@pytest.mark.slow
def test_sessions_cannot_connect_to_each_other(boxes: Callable[..., Box]) -> None:
    one, other = boxes(), boxes()
    listening = one.submit(
        "import socket\n"
        "a = socket.create_server(('0.0.0.0', 4242))\n"
        "b = socket.socket(socket.AF_UNIX); b.bind('\\0meeting'); b.listen()\n"
        "print('ready', flush=True)\n"
        "a.settimeout(4)\n"
        "try: a.accept(); print('heard')\nexcept TimeoutError: pass",
    )
    code = """
import ctypes, socket
for call in (lambda: socket.create_connection(("127.0.0.1", 4242), timeout=1),
             lambda: socket.socket(socket.AF_UNIX).connect("\\0meeting")):
    try:
        call()
        print("connected")
    except OSError:
        pass
"""
    assert other.printed(code) == ""
    assert "heard" not in one.result(listening)["stdout"]


def test_sessions_share_no_memory_segments_or_queues(boxes: Callable[..., Box]) -> None:
    one, other = boxes(), boxes()
    make = "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\nprint({flags})"
    calls = "l.shmget(77, 4096, {0}), l.msgget(77, {0}), l.semget(77, 1, {0})"
    made = one.printed(make.format(flags=calls.format("0o1600")))
    assert "-1" not in made
    assert other.printed(make.format(flags=calls.format("0o600"))) == "-1 -1 -1"
    assert one.printed(make.format(flags=calls.format("0o600"))) == made


def test_loopback_inside_works(shared: Box) -> None:
    code = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
listener.accept()[0].send(b"hello")
print(client.recv(5).decode())
"""
    assert shared.printed(code) == "hello"
