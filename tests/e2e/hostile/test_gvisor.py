"""
Code under gVisor, whose kernel protects less of a container's first process than Linux does: it
delivers signals to it, and lets others of its user open its descriptors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from atoll.drivers.docker.exec_link import SOCKET_NAME as NAME
from tests.e2e.hostile.conftest import SMALL, attackable
from tests.e2e.hostile.host import MiB, resident
from tests.e2e.hostile.test_files_api import try_link
from tests.servers.images import PYTHON

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box
    from tests.servers.docker import Dockerd

OPENED = f"""
import os
def is_relay(pid):
    with open(f"/proc/{{pid}}/cmdline") as file:
        return file.read().endswith("{NAME}\\0")
relays = [pid for pid in os.listdir("/proc") if pid.isdigit() and is_relay(pid)]
assert relays
def descriptors(pid):
    try:
        return os.listdir(f"/proc/{{pid}}/fd")
    except PermissionError:
        return []
for pid in (1, os.getppid(), *relays):
    for number in descriptors(pid):
        path = f"/proc/{{pid}}/fd/{{number}}"
        if os.path.isdir(path):
            continue  # The workspace, which is user code's own.
        for flags in (os.O_RDWR, os.O_RDONLY, os.O_WRONLY):
            try:
                os.chmod(path, 0o666)
            except OSError:
                pass
            try:
                fd = os.open(path, flags | os.O_NONBLOCK)
            except OSError:
                continue
            name = os.readlink(f"/proc/self/fd/{{fd}}")
            if pid in relays or name.startswith("/") and name != "/dev/null":
                print(pid, name, flags)
            os.close(fd)
"""
SIGNALS = """
import ctypes, fcntl, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
def tried(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        pass
for number in range(1, 65):
    tried(os.kill, 1, number)
    libc.syscall(200, 1, number)     # tkill
    libc.syscall(234, 1, 1, number)  # tgkill
for number in (0, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGUSR1):
    left, right = socket.socketpair()
    tried(fcntl.fcntl, left, fcntl.F_SETOWN, 1)
    tried(fcntl.fcntl, left, 10, number)  # F_SETSIG
    fcntl.fcntl(left, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    right.send(b"x")
for flags in (signal.SIGKILL, 0x8000 | signal.SIGKILL):  # CLONE_PARENT
    if os.fork() == 0:
        if libc.syscall(56, flags, 0, 0, 0, 0) == 0:
            os._exit(0)
        os._exit(0)
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open("daemon", "w") as file:
            file.write(str(os.getpid()))
    else:
        os._exit(0)
time.sleep(600)
"""
REACHED = """
import os, socket, struct
for address in (("127.0.0.1", {port}), ("169.254.169.254", 80), ("10.0.0.1", 80)):
    with socket.socket() as tried:
        tried.settimeout(5)
        if tried.connect_ex(address) == 0:
            print("reached", address)
for path in ("/var/run/docker.sock", "/run/docker.sock", {engine!r}, {secret!r}):
    if os.path.exists(path):
        print("there", path)
with socket.socket(socket.AF_UNIX) as tried:
    if tried.connect_ex("/run/atoll/link/link.sock") == 0:
        print("connected to the link")
# The relay's: open to its user alone, whose credentials others cannot send.
for uid in (1001, 0, os.getuid()):
    with socket.socket(socket.AF_UNIX) as tried:
        tried.settimeout(5)
        who = struct.pack("3i", os.getpid(), uid, uid)
        try:
            tried.connect("\\0atoll-link")
            tried.sendmsg([b"\\n"], [(socket.SOL_SOCKET, 2, who)])
            tried.sendall(b"\\0\\0\\0\\2\\0\\0\\0\\0\\1{{}}")
            if answer := tried.recv(100):
                print("answered", uid, answer)
        except TimeoutError:
            print("waits for", uid)
        except OSError:
            pass
for kind in ((socket.AF_PACKET, socket.SOCK_RAW), (socket.AF_INET, socket.SOCK_RAW)):
    try:
        socket.socket(*kind)
        print("made", kind)
    except OSError:
        pass
"""


@pytest.fixture(scope="module")
def gvisor(
    runsc: str, dockerd: Dockerd, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    settings = {
        "ATOLL_DRIVER": "docker",
        "ATOLL_DOCKER__URL": dockerd.url,
        "ATOLL_DOCKER__IMAGE": PYTHON,
        "ATOLL_DOCKER__RUNTIME": runsc,
        "ATOLL_POOL__SIZE": "0",
    }
    with attackable("root", tmp_path_factory.mktemp("gvisor"), **settings) as target:
        yield target


@pytest.fixture(scope="module")
def box(gvisor: Target) -> Iterator[Box]:
    made = gvisor.box(**SMALL)
    yield made
    gvisor.client.delete(made.url)


@pytest.mark.quick
def test_no_signal_ends_or_stops_the_executor(box: Box) -> None:
    before = box.instance
    box.printed(SIGNALS)
    box.assert_usable()
    assert box.instance == before


def test_no_file_opened_by_the_executor_can_be_opened(box: Box) -> None:
    """Its journal is a file of the host that no limit of user code counts."""
    assert box.printed(OPENED) == ""
    # What it writes there afterwards is written.
    assert box.printed("print('kept')") == "kept"


def test_nothing_of_the_host_can_be_reached(gvisor: Target, box: Box, dockerd: Dockerd) -> None:
    port = gvisor.client.base_url.port
    secret = str(gvisor.server.data_dir / "key")
    code = REACHED.format(port=port, engine=str(dockerd.socket), secret=secret)
    assert box.printed(code, timeout=60) == ""


def test_a_timeout_ends_daemons_too(box: Box) -> None:
    assert box.run(DAEMON, timeout=3)["status"] == "timeout"
    pid = box.client.get(f"{box.files}/daemon").text
    assert box.printed(f"import os; print(os.path.exists('/proc/{pid}'))") == "False"


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/1/environ", "/tmp/x"])
def test_the_files_api_follows_no_link_out_of_the_workspace(box: Box, path: str) -> None:
    try_link(box, path)


@pytest.mark.parametrize(
    ("code", "causes"),
    [
        ("held = []\nwhile True: held.append(bytearray(2**23))", {"oom"}),
        ("f = open('big', 'wb')\nwhile True: f.write(bytes(2**20)); f.flush()", {"disk", "exit"}),
        ("import os\nwhile True: os.open('/dev/null', 0)", {"exit"}),
        ("import sys\nwhile True: sys.stdout.write('x' * 65536)", {"timeout"}),
    ],
    ids=["memory", "disk", "descriptors", "output"],
)
def test_limits_are_enforced_and_the_memory_of_the_server_does_not_grow(
    gvisor: Target, box: Box, code: str, causes: set[str]
) -> None:
    before = resident(gvisor.pid)
    result = box.run(code, timeout=5)
    assert result["cause"] in causes, result
    assert resident(gvisor.pid) < before + 64 * MiB
    box.run("import os\nfor name in os.listdir('.'): os.unlink(name)")
    box.assert_usable()
