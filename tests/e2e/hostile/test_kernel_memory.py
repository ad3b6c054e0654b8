"""
Memory that no process has mapped: buffers of sockets, unnamed files, System V objects.

A session of 64Mi allocates three times as much of each kind. Either the kernel grants only the
limit, or the execution is ended for memory; the session survives both.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import drivers
from tests.e2e.hostile.host import MiB, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box

MEMORY = 64 * MiB
LARGEST = 192 * MiB
"""What an attack takes at most: far less than would harm the host."""
PAGE = 4096

BEGIN = f"""
import ctypes, os, resource, signal, socket, struct
LARGEST = {LARGEST}
held, total = [], 0
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
libc = ctypes.CDLL(None, use_errno=True)
def large(*sockets):
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
        held.append(one)
def fill(one, size=1 << 16):
    global total
    one.setblocking(False)
    try:
        while total < LARGEST:
            total += one.send(bytes(size))
    except BlockingIOError:
        pass
"""
END = "\nopen('full', 'w').close()\nsignal.pause()"

NETWORK = {
    "TCP": """
listener = socket.create_server(("127.0.0.1", 0), backlog=256)
large(listener)
for _ in range(200):
    one = socket.create_connection(listener.getsockname())
    large(one, listener.accept()[0])
    fill(one)
""",
    "TCP that waits to be accepted": """
listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
large(listener)
for _ in range(400):
    with socket.create_connection(listener.getsockname()) as one:
        for _ in range(20):
            fill(one)
""",
    "UDP": """
for _ in range(50):
    to, one = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in "ab")
    to.bind(("127.0.0.1", 0))
    one.connect(to.getsockname())
    large(one, to)
    one.setblocking(False)
    for _ in range(150):
        try:
            one.send(bytes(60_000))
        except BlockingIOError:
            break
""",
    "netlink": """
request = struct.pack("=IHHIIBxHiII", 32, 18, 1, 0, 0, 0, 0, 1, 0, 0)
for _ in range(LARGEST // (2 << 20)):
    one = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    large(one)
    for _ in range(500):
        one.send(request)
""",
}
OTHER = {
    "unix sockets": """
while total < LARGEST:
    large(*(pair := socket.socketpair()))
    fill(pair[0])
""",
    "unix sockets with closed senders": """
while total < LARGEST:
    one, other = socket.socketpair()
    large(other)
    fill(one)
    one.close()
""",
    "unix datagrams": """
while total < LARGEST:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    large(other)
    one.send(b"")
    fill(one, 100_000)
    one.close()
""",
    "unix connections that wait to be accepted": """
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0attack")
listener.listen(4096)
for _ in range(2000):
    one = socket.socket(socket.AF_UNIX)
    one.connect("\\0attack")
    fill(one)
    one.close()
""",
    "memory files": """
for number in range(LARGEST >> 23):
    held.append(os.memfd_create(str(number)))
    os.posix_fallocate(held[-1], 0, 8 << 20)
""",
    "memory files of a closed process": """
libc.prctl(4, 0)
for number in range(LARGEST >> 23):
    held.append(os.memfd_create(str(number)))
    os.posix_fallocate(held[-1], 0, 8 << 20)
""",
    "memory files of a process whose first thread has ended": """
import threading
def take():
    for number in range(LARGEST >> 23):
        held.append(os.memfd_create(str(number)))
        os.posix_fallocate(held[-1], 0, 8 << 20)
    open('full', 'w').close()
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
    threading.Event().wait()
if os.fork() == 0:
    threading.Thread(target=take).start()
    libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)
""",
    "System V segments": """
libc.shmat.restype = ctypes.c_void_p
for _ in range(LARGEST >> 23):
    place = libc.shmat(libc.shmget(0, 8 << 20, 0o1600), None, 0)
    ctypes.memset(place, 1, 8 << 20)
    libc.shmdt(ctypes.c_void_p(place))
""",
    "System V semaphores": """
while total < LARGEST and libc.semget(0, 32_000, 0o1000) >= 0:
    total += 32_000 * 64
""",
    "page tables": """
import mmap
area = 1 << 30
for _ in range(LARGEST // (area >> 9)):
    one = mmap.mmap(-1, area, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    one.madvise(15)  # Without huge pages.
    one[:: 2 << 20]
    held.append(one)
""",
}

QUICK = ("unix sockets", "memory files", "System V segments")


def in_buffers(box: Box) -> int:
    """Bytes in buffers of TCP and UDP on the host, and of netlink in the sandbox."""
    pages = 0
    for line in Path("/proc/net/sockstat").read_text().splitlines():
        name, *words = line.split()
        if name in ("TCP:", "UDP:"):
            pages += int(words[words.index("mem") + 1])
    netlink = Path(f"/proc/{box.pid_1}/net/netlink").read_text().splitlines()[1:]
    return pages * PAGE + sum(int(line.split()[4]) for line in netlink)


@pytest.mark.quick
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.every_driver] * (kind == "TCP")) for kind in NETWORK],
)
def test_socket_buffers_stay_within_the_limit(
    target: Target, boxes: Callable[..., Box], kind: str
) -> None:
    box = boxes(memory="64Mi", disk="32Mi", max_processes=48)
    box.assert_usable()
    before = most = in_buffers(box)
    execution = box.submit(BEGIN + NETWORK[kind] + END, timeout=30)
    if drivers.CHOSEN == "local" and target.privileged and kind in ("TCP", "UDP"):

        def full() -> bool:
            nonlocal most
            most = max(most, in_buffers(box))
            return box.client.get(f"{box.files}/full").is_success

        eventually(full, kind)
        assert most - before < MEMORY / 2
        box.client.post(f"/api/v1/executions/{execution}/cancel")
    else:
        # Between two looks of the watcher all goes; it may not last.
        result = box.result(execution)
        assert (result["status"], result["cause"]) == ("failed", "oom"), result
    eventually(lambda: in_buffers(box) - before < MEMORY / 4, "room in the buffers")
    box.assert_usable()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.quick] if kind in QUICK else []) for kind in OTHER],
)
def test_kernel_memory_counts_as_memory_of_the_session(
    target: Target, boxes: Callable[..., Box], kind: str
) -> None:
    if drivers.CHOSEN != "local":
        pytest.skip("a container's control group counts it")
    box = boxes(memory="64Mi", disk="256Mi", max_processes=48)
    result = box.run(BEGIN + OTHER[kind] + END)
    if kind == "memory files of a closed process" and not target.privileged:
        assert (result["status"], result["signal"]) == ("failed", "SIGKILL"), result
    else:
        assert (result["status"], result["cause"]) == ("failed", "oom"), result
    box.assert_usable()


def test_code_that_uses_little_of_each_kind_runs(boxes: Callable[..., Box]) -> None:
    box = boxes(memory="64Mi", disk="32Mi")
    code = """
import mmap, os, socket, tempfile, threading
pairs = [socket.socketpair() for _ in range(50)]
[one.send(bytes(10_000)) for one, _ in pairs]
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
server.accept()[0].sendall(bytes(50_000))
pipes = [os.pipe() for _ in range(50)]
shared = mmap.mmap(-1, 8 << 20)
shared[:] = bytes(8 << 20)
file = os.memfd_create("x")
os.truncate(file, 8 << 20)
mapped = mmap.mmap(file, 8 << 20)
mapped[:] = bytes(8 << 20)
for _ in range(4):
    if os.fork() == 0:
        shared[::4096], mapped[::4096]
        threading.Event().wait(1)
        os._exit(0)
for _ in range(4):
    os.wait()
print("done")
"""
    assert box.printed(code) == "done"
