"""
Code in a context that attacks the executor: executor and session survive, and forged messages
affect only the attacker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.hostile.conftest import either_variant

if TYPE_CHECKING:
    from tests.e2e.hostile.host import Box

pytestmark = either_variant

CONTROL = """
import os, socket, stat, struct, time
def control():
    for fd in range(3, 256):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                return fd
        except OSError:
            pass
def number():
    import gc
    for item in gc.get_objects():
        if type(item).__name__ == "ContextInterpreter":
            return item._number
def show(payload):
    link.send(b"s" + struct.pack("!QQ", here, len(payload)))
    for start in range(0, len(payload), 1024):
        link.send(b"p" + payload[start:start + 1024])
original, here = control(), number()
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=os.dup(original))
"""


class Context:
    def __init__(self, box: Box) -> None:
        self.box = box
        self.url = f"{box.url}/contexts"
        answer = box.client.post(self.url, json={})
        assert answer.status_code == 201, answer.text
        self.id = answer.json()["id"]

    def run(self, code: str, **request: Any) -> dict[str, Any]:
        return self.box.run(code, context_id=self.id, **request)

    @property
    def state(self) -> str:
        answer = self.box.client.get(f"{self.url}/{self.id}")
        assert answer.status_code == 200, answer.text
        return str(answer.json()["state"])

    def assert_restarts(self) -> None:
        answer = self.box.client.post(f"{self.url}/{self.id}/restart")
        assert answer.status_code == 200, answer.text
        assert self.run("6 * 7")["results"][0]["data"]["text/plain"] == "42"


@pytest.fixture
def context(fresh: Box) -> Context:
    return Context(fresh)


@pytest.mark.parametrize(
    "attack",
    [
        "link.send(b'garbage')",
        "link.send(b'')",
        "link.send(b'r')",
        "link.send(b'd')",
        "link.send(b's' + bytes(3))",
        "link.send(b'E{')",
        "link.send(bytes(60_000))",
        "link.close(); os.close(original)",
        "link.shutdown(socket.SHUT_RDWR)",
        "while True: link.send(b'x' * 1000)",
        "socket.send_fds(link, [b'!'], [0, 1, 2])",
        "link.close(); os.dup2(0, original)",
    ],
)
def test_nonsense_on_the_control_socket_ends_only_the_context(
    context: Context, attack: str
) -> None:
    result = context.run(f"{CONTROL}\n{attack}\ntime.sleep(60)", timeout=3)
    assert result["status"] in ("failed", "timeout")
    context.box.assert_usable()
    assert context.state in ("dead", "idle")
    context.assert_restarts()


def test_a_forged_end_ends_only_its_own_execution(context: Context) -> None:
    forged = "link.send(b'd' + struct.pack('!QB', here, 0))"
    assert context.run(f"{CONTROL}\n{forged}\ntime.sleep(1)\nx = 1")["status"] == "success"
    for other in (0, 1, 2**63):
        context.run(f"{CONTROL}\nlink.send(b'd' + struct.pack('!QB', {other}, 7))\ny = 2")
    # What came after the first one was done in the end, and answered for itself.
    result = context.run("x + y")
    assert result["results"][0]["data"]["text/plain"] == "3"


@pytest.mark.quick
@pytest.mark.parametrize(
    "payload",
    [
        b"no json",
        b"[]",
        b'{"type":"other","data":{}}',
        b'{"type":"result","data":[]}',
        b'{"type":"result","data":{"text/plain":NaN}}',
        b'{"type":"result","data":{"x":1e999}}',
        b'{"type":"result","data":{}}\n{"type":"result","data":5}',
        b'{"id":"1","state":"asked"}',
        b'{"type":"result","data":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
        b'{"type":"result","data":{"a":' + b"[" * 100_000,
        b"\xff\xfe",
    ],
    ids=range(11),
)
def test_forged_displays_are_well_formed_or_dropped(context: Context, payload: bytes) -> None:
    result = context.run(f"{CONTROL}\nshow({payload!r})\n'last'")
    assert result["status"] == "success", result
    assert result["results"][-1]["data"] == {"text/plain": "'last'"}
    for shown in result["results"]:
        assert set(shown) == {"type", "data", "metadata"}
        assert isinstance(shown["data"], dict)
    again = context.box.result(result["execution_id"])
    assert again["results"] == result["results"]
    context.box.assert_usable()


def test_a_display_announced_larger_than_memory_is_dropped(context: Context) -> None:
    result = context.run(
        f"{CONTROL}\nlink.send(b's' + struct.pack('!QQ', here, 2**63))\n"
        "for _ in range(100): link.send(b'p' + bytes(30_000))\n"
        "'last'"
    )
    first, last = result["results"]
    assert first["metadata"] == {"dropped": True}
    assert last["data"]["text/plain"] == "'last'"


def test_the_size_of_displays_is_bounded(context: Context) -> None:
    result = context.run(
        "for n in range(40): display({'text/html': 'x' * 500_000}, raw=True)\n", timeout=30
    )
    sizes = [len(str(shown["data"])) for shown in result["results"]]
    assert sum(sizes) < 9 * 1024 * 1024
    assert [shown for shown in result["results"] if shown["metadata"] == {"dropped": True}]
    many = context.run(f"{CONTROL}\nfor n in range(50_000): show(b'{{}}')", timeout=60, wait=80)
    assert many["status"] == "success", many
    context.box.assert_usable()


@pytest.mark.quick
@pytest.mark.parametrize(
    "body",
    [
        "def _repr_html_(self): raise RuntimeError('no')",
        "def _repr_html_(self): return 5",
        "def _repr_html_(self): return {1: 2}",
        "def _repr_png_(self): return object()",
        "def _repr_json_(self): return float('nan')",
        "def _repr_mimebundle_(self, **_): return {5: 'x', 'text/plain': b'b', 'a/b': object()}",
        "def __repr__(self): raise RuntimeError('no')",
        "def __repr__(self): return 5",
        "def __getattr__(self, name): raise RuntimeError(name)",
    ],
)
def test_a_value_whose_repr_fails_does_no_harm(context: Context, body: str) -> None:
    context.run(f"class Bad:\n    {body}\nx = 1")
    assert context.run("display(Bad()); Bad()")["status"] in ("success", "failed")
    assert context.run("x")["results"][0]["data"]["text/plain"] == "1"


@pytest.mark.every_driver
def test_a_value_whose_repr_never_returns_is_interrupted(context: Context) -> None:
    for _ in range(3):
        context.run("class Slow:\n    def _repr_html_(self):\n        while True: pass\nx = 1")
        assert context.run("Slow()", timeout=1)["status"] == "timeout"
        if context.state != "dead":
            break
        # On a busy machine the interrupt may arrive too late.
        context.assert_restarts()
    assert context.run("x")["results"][0]["data"]["text/plain"] == "1"


def test_a_value_larger_than_memory_ends_at_most_the_context(context: Context) -> None:
    context.run("class Big:\n    def _repr_html_(self): return 'x' * 100_000_000\nBig()")
    context.box.assert_usable()
    context.assert_restarts()


def test_a_fork_that_continues_does_not_replace_the_context(context: Context) -> None:
    result = context.run("import os\nx = 1\npid = os.fork()\nx = 2 if pid == 0 else x\nprint(x)")
    assert result["status"] == "success"
    assert context.run("x")["results"][0]["data"]["text/plain"] == "1"
    assert context.run("os.waitpid(-1, 0)[1]")["results"][0]["data"]["text/plain"] == "0"


def test_a_fork_that_keeps_the_socket_does_not_hide_the_exit(context: Context) -> None:
    result = context.run(f"{CONTROL}\nif os.fork() == 0: time.sleep(600)\nos._exit(5)")
    assert (result["status"], result["exit_code"]) == ("failed", 5)
    assert context.state == "dead"
    context.box.assert_usable()
    assert context.box.printed("import os; print(len(os.listdir('/proc/1/task')) > 0)") == "True"
    context.assert_restarts()


def test_a_fork_that_steals_jobs_ends_with_their_timeout(context: Context) -> None:
    context.run(f"{CONTROL}\nif os.fork() == 0:\n    while True: link.recv(1 << 20)")
    result = context.run("1", timeout=2)
    assert result["status"] in ("success", "timeout")
    context.box.assert_usable()
    context.assert_restarts()


@pytest.mark.every_driver
@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nos.kill(os.getpid(), 9)",
        "import os, signal\nos.kill(-1, signal.SIGKILL)\nwhile True: pass",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        "import builtins\nbuiltins.len = builtins.isinstance = builtins.getattr = None",
        "import os\nos.dup2 = os.close = os.getpid = None",
        "import sys\nsys.modules.clear()",
        "import os\nos.closerange(0, 1024)",
        "import os\nfor _ in range(5000):\n    try: os.dup(0)\n    except OSError: break",
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
        "import sys\nsys.settrace(lambda *a: 1/0)",
        "import sys\nsys.setrecursionlimit(60)",
        "import threading, os\nthreading.Timer(0.2, os._exit, (1,)).start()",
        "display = print = None",
        "import builtins\nbuiltins.display = builtins.print = 5",
        "import ctypes\nctypes.string_at(0)",
        "x = bytearray(1 << 40)",
        "x = [bytearray(1 << 20) for _ in range(1000)]",
    ],
)
def test_a_session_survives_all_attacks_on_its_context(context: Context, code: str) -> None:
    context.run(code, timeout=3)
    if context.state == "idle":
        body = {"code": "1", "context_id": context.id, "timeout": 3, "wait": 50}
        answer = context.box.client.post(f"{context.box.url}/execute", json=body)
        # It may end just then.
        assert answer.status_code == 200 or answer.json()["code"] == "context_dead", answer.text
    context.box.assert_usable()
    context.assert_restarts()
