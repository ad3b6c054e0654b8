"""Output and results: bounded, honest about what was cut, and not to be forged into trouble."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from atoll.drivers.shared import environment_variables
from tests import drivers
from tests.e2e.hostile.conftest import SECRET, either_variant
from tests.e2e.hostile.host import MiB, resident, strict_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box

pytestmark = [pytest.mark.every_driver, either_variant]

LIMIT = MiB


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("line", [b"x" * 65_535 + b"\n", b"x" * 65_536, b"\0" * 65_536])
def test_long_output_is_truncated_and_its_full_size_reported(
    target: Target, shared: Box, stream: str, line: bytes
) -> None:
    before = resident(target.pid)
    number = 1 if stream == "stdout" else 2
    result = shared.run(
        f"import os\nblock = {line[:1]!r} * 65535 + {line[-1:]!r}\n"
        f"for _ in range(1600):\n    os.write({number}, block)"
    )
    assert result["status"] == "success"
    assert result[f"{stream}_truncated"] is True
    assert result[f"{stream}_bytes"] == 1600 * 65_536
    assert len(result[stream]) == LIMIT
    assert resident(target.pid) - before < 48 * MiB


def test_endless_output_ends_at_the_timeout_without_using_memory(
    target: Target, shared: Box
) -> None:
    before = resident(target.pid)
    inside = resident(shared.pid_1)
    for seconds in (3, 10, 20):
        result = shared.run("import os\nwhile True: os.write(1, b'y' * 65536)", timeout=seconds)
        assert (result["status"], result["stdout_truncated"]) == ("timeout", True)
        if result["stdout_bytes"] > 50 * MiB:
            break
    assert result["stdout_bytes"] > 50 * MiB
    assert len(result["stdout"]) == LIMIT
    assert resident(target.pid) - before < 48 * MiB
    assert resident(shared.pid_1) - inside < 32 * MiB


def test_output_written_byte_by_byte_uses_no_more_memory(target: Target, shared: Box) -> None:
    before, inside = resident(target.pid), resident(shared.pid_1)
    code = "import os\nfor n in range(400_000): os.write(1 + n % 2, b'z')"
    result = shared.run(code, timeout=25)
    assert result["status"] == "success", result["cause"]
    assert (result["stdout_bytes"], result["stderr_bytes"]) == (200_000, 200_000)
    assert resident(target.pid) - before < 64 * MiB
    assert resident(shared.pid_1) - inside < 32 * MiB
    shared.assert_usable()


def test_output_that_is_not_utf8_is_decoded_with_replacement_characters(shared: Box) -> None:
    result = shared.run(
        "import os\nos.write(1, b'a\\xff\\x00b\\xc3')\nos.write(2, bytes(range(256)))"
    )
    assert result["stdout"] == "a\ufffd\0b\ufffd"
    assert (result["stdout_bytes"], result["stderr_bytes"]) == (5, 256)
    assert result["stdout_truncated"] is False


def test_a_character_split_between_writes_is_decoded(shared: Box) -> None:
    code = (
        "import os, time\n"
        "for b in 'é€😀'.encode():\n    os.write(1, bytes([b]))\n    time.sleep(.01)"
    )
    assert shared.printed(code) == "é€😀"


FORGED: dict[str, tuple[str, Any]] = {
    "a value": ("V{\"forged\": 1}", {"forged": 1}),
    "nothing of ours": ("garbage", None),
    "an error": ("E{\"code\": \"oom\", \"message\": \"m\", \"more\": [1]}", None),
    "an error that is no object": ("E[1, 2]", None),
    "an error of odd types": ("E{\"code\": [1], \"message\": {\"a\": null}, \"name\": 7}", None),
    "NaN": ("VNaN", None),
    "infinity": ("V1e999", None),
    "negative infinity": ("V[-1e999]", None),
    "half a character": ("V\"\\\\ud800\"", "\ud800"),
    "an error with half a character": ("E{\"code\": \"\\\\ud800\", \"name\": \"\\\\udfff\"}", None),
    "an error with NUL": ("E{\"code\": \"\\\\u0000\", \"message\": \"\\\\u0000\"}", None),
    "twice the same key": ("V{\"a\": 1, \"a\": 2}", {"a": 2}),
    "a huge number": ("V\" + \"9\" * 100000 + \"", None),
    "two values": ("V1V2", None),
    "half of a value": ("V{\"a\": [1, 2", None),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_result_changes_only_its_own_execution(shared: Box, kind: str) -> None:
    text, value = FORGED[kind]
    text = text.replace('"', '\\"').replace('\\" + \\"9\\" * 100000 + \\"', '" + "9" * 100000 + "')
    code = f"""
import os
for fd in range(3, 64):
    try:
        os.write(fd, ("{text}").encode())
    except OSError:
        pass
os._exit(0)
"""
    result = shared.run(code)
    assert result["status"] in ("success", "failed")
    assert result["cause"] in (None, "exit")
    assert result["return_value"] == value
    listed = shared.client.get(f"{shared.url}/executions", params={"limit": 5})
    assert listed.status_code == 200
    strict_json(listed.text)
    shared.assert_usable()


@pytest.mark.parametrize("depth", [*range(60, 1000, 94), 5_000, 100_000])
def test_a_value_of_any_depth_gives_a_readable_result(shared: Box, depth: int) -> None:
    code = f"""
import os
if os.environ.get("forge"):
    body = b"V" + b"[" * {depth} + b"]" * {depth}
    for fd in range(3, 32):
        try: os.write(fd, body)
        except OSError: pass
    os._exit(0)
def handler(event):
    value = []
    for _ in range({depth} - 1):
        value = [value]
    return value
"""
    for env in ({}, {"forge": "1"}):
        result = shared.run(code, env=env)
        assert result["status"] in ("success", "failed")
        if result["status"] == "failed":
            assert result["error"]["code"] == "return_value_not_json"
        assert shared.result(result["execution_id"])["status"] == result["status"]
        url = f"/api/v1/executions/{result['execution_id']}"
        assert shared.client.get(url).status_code == 200
    assert shared.client.get(f"{shared.url}/executions").status_code == 200
    shared.assert_usable()


VALUES = {
    "NaN": ("float('nan')", "return_value_not_json"),
    "infinity": ("{'a': [float('inf')]}", "return_value_not_json"),
    "a set": ("{1}", "return_value_not_json"),
    "bytes": ("b'x'", "return_value_not_json"),
    "itself": ("(lambda a: a.append(a) or a)([])", "return_value_not_json"),
    "a huge text": ("'x' * (2 << 20)", "return_value_too_large"),
    "a huge number": ("10 ** 5000", "return_value_not_json"),
    "an object with hostile methods": (
        "type('X', (dict,), {'items': lambda s: 1 / 0, '__len__': lambda s: 1})(a=1)",
        None,
    ),
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_return_value_that_is_not_json_is_refused_with_its_reason(shared: Box, kind: str) -> None:
    expression, expected = VALUES[kind]
    result = shared.run(f"def handler(event):\n    return {expression}")
    if expected is not None:
        assert (result["status"], result["exit_code"]) == ("failed", 1)
        assert result["error"]["code"] == expected
    assert result["return_value"] is None or expected is None


def test_lone_surrogates_in_a_value_or_an_exception_do_no_harm(shared: Box) -> None:
    result = shared.run("def handler(event):\n    return ['\\ud800', {'\\udfff': 1}]")
    assert result["return_value"] == ["\ud800", {"\udfff": 1}]
    result = shared.run("raise ValueError('\\ud800 \\x00 \\udcff')")
    assert (result["status"], result["error"]["name"]) == ("failed", "ValueError")
    shared.assert_usable()


HOSTILE_ENDS = {
    "__str__ that raises": "class E(Exception):\n"
    "    def __str__(self): raise SystemExit(0)\nraise E",
    "__str__ that is no text": "class E(Exception):\n    def __str__(self): return 5\nraise E",
    "__str__ of a class of its own": "class S(str):\n    def __getitem__(self, i): raise KeyError\n"
    "class E(Exception):\n    def __str__(self): return S('x')\nraise E",
    "a name that raises": "class M(type):\n    @property\n    def __name__(c): raise KeyError\n"
    "class E(Exception, metaclass=M): pass\nraise E",
    "__repr__ without end": "class E(Exception):\n    def __repr__(self): return repr(self)\n"
    "    __str__ = __repr__\nraise E",
    "causes in a circle": "a, b = ValueError(1), ValueError(2)\n"
    "a.__cause__ = b\nb.__cause__ = a\nraise a",
    "ten thousand causes": "e = None\nfor n in range(10000):\n    x = ValueError(n)\n"
    "    x.__cause__ = e\n    e = x\nraise e",
    "a group without end": "e = ValueError(1)\n"
    "for _ in range(2000): e = ExceptionGroup('g', [e])\nraise e",
    "no stderr": "import sys\nsys.stderr = None\nraise ValueError(1)",
    "a stderr that raises": "import sys\nclass X:\n    def write(self, t): raise KeyError\n"
    "sys.stderr = X()\nraise ValueError(1)",
    "no stdout": "import sys\nsys.stdout = None\nraise ValueError(1)",
    "an excepthook that raises": "import sys\n"
    "def hook(*a): raise KeyError\nsys.excepthook = hook\nraise ValueError(1)",
    "sys.exit of an object": "import sys\n"
    "class X:\n    def __str__(self): raise KeyError\nsys.exit(X())",
    "sys.exit without stderr": "import sys\nsys.stderr = None\nsys.exit('bye')",
    "no modules": "import sys\nsys.modules.clear()\nraise ValueError(1)",
    "no descriptors left": "import os\nheld = []\nwhile True: held.append(os.open('/dev/null', 0))",
    "broken os": "import os\nos.write = os.read = None\nraise ValueError(1)",
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("kind", HOSTILE_ENDS)
def test_code_that_breaks_its_own_exit_fails(shared: Box, kind: str) -> None:
    result = shared.run(HOSTILE_ENDS[kind], timeout=10)
    assert (result["status"], result["exit_code"]) == ("failed", 1), result
    assert result["cause"] == "exit"
    shared.assert_usable()


CLOSERS = {
    "closes its streams": ("import os\nos.closerange(0, 3)", "success"),
    "closes every descriptor": ("import os\nos.closerange(0, 1024)", "success"),
    "closes the objects": (
        "import sys\nsys.stdout.close()\nsys.stderr.close()\nsys.stdin.close()",
        None,
    ),
    "replaces stdout": ("import sys\nsys.stdout = 5", None),
    "replaces stdout by one that works": (
        "import io, sys\nsys.stdout = io.StringIO()\nprint('unseen')",
        "success",
    ),
    "replaces sys.exit": ("import sys\nsys.exit = print\nsys.exit(3)", "success"),
    "replaces os._exit": ("import os\nos._exit = print", None),
    "replaces json": (
        "import json\njson.dumps = json.loads = None\ndef handler(e): return {'ok': True}",
        "success",
    ),
    "raises SystemExit in atexit": ("import atexit, sys\natexit.register(sys.exit, 0)", "success"),
    "exits in a thread": (
        "import threading, sys\nthreading.Thread(target=sys.exit).start()",
        "success",
    ),
    "recurses without end": ("def f(): f()\nf()", "failed"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "failed"),
    "aborts": ("import os\nos.abort()", "failed"),
    "stops itself": ("import os\nos.kill(os.getpid(), 19)", "timeout"),
    "waits for input": ("input()", "failed"),
    "removes the builtins": (
        "import builtins\nfor n in list(vars(builtins)):\n"
        "    if n not in ('list', 'vars', 'delattr'): delattr(builtins, n)",
        "failed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CLOSERS)
def test_code_that_breaks_its_own_interpreter_gets_a_result(shared: Box, kind: str) -> None:
    code, expected = CLOSERS[kind]
    result = shared.run(code, timeout=2 if expected == "timeout" else 20)
    assert result["status"] == (expected or result["status"]), result
    assert result["status"] in ("success", "failed", "timeout")
    shared.assert_usable()


def test_a_forked_child_does_not_set_the_result(shared: Box) -> None:
    result = shared.run(
        "import os\n"
        "def handler(event):\n"
        "    if os.fork() == 0: raise ValueError('the child')\n"
        "    os.wait()\n    return 'the parent'"
    )
    assert (result["status"], result["return_value"]) == ("success", "the parent")


GIVEN = {
    "LANG", "PATH", "PWD", "PYTHONPATH", *environment_variables.INSTANCE,
    "ATOLL_EXECUTION_ID", "ATOLL_INVOCATION_ID", "ATOLL_SESSION_ID", "ATOLL_STAGING",
    "ATOLL_PYTHON",
}  # fmt: skip
"""What code finds in its environment when the session and the request give it nothing."""


@pytest.mark.quick
def test_code_inherits_nothing_from_the_server(target: Target, shared: Box) -> None:
    code = """
import os
print(sorted(os.environ))
numbers = sorted(map(int, os.listdir("/proc/self/fd")))
places = [f"/proc/self/fd/{fd}" for fd in numbers if os.path.lexists(f"/proc/self/fd/{fd}")]
print([os.readlink(place).split(":")[0] for place in places])
print(open("/proc/self/environ", "rb").read())
"""
    names, descriptors, raw = shared.printed(code).splitlines()
    assert "SECRET" not in names + raw
    assert SECRET not in raw
    assert set(eval(names)) <= GIVEN | drivers.VARIABLES
    # Input, two outputs and the result; nothing else is open.
    assert eval(descriptors) == ["/dev/null", "pipe", "pipe", "pipe"]
    everything = shared.printed("cat /proc/*/environ 2>/dev/null; env", language="shell")
    assert SECRET not in everything


def test_shell_code_inherits_nothing_from_the_server(shared: Box) -> None:
    names = shared.printed("env | cut -d= -f1 | sort", language="shell").splitlines()
    assert set(names) <= GIVEN | drivers.VARIABLES | {"OLDPWD", "SHLVL", "_"}
    # Input and two outputs; not the pipe of the result.
    opened = shared.printed("readlink /proc/$$/fd/*; true", language="shell")
    assert opened.count("pipe:") == 2, opened
    result = shared.run("for n in 3 4 5 6 7 8 9; do echo V1 >&$n; done; true", language="shell")
    assert (result["status"], result["return_value"]) == ("success", None)


def test_environments_of_sessions_are_separate(boxes: Callable[..., Box]) -> None:
    one, other = boxes(env_vars={"TOKEN": "only-mine"}), boxes()
    assert one.printed("import os; print(os.environ['TOKEN'])") == "only-mine"
    assert other.printed("import os; print(os.environ.get('TOKEN'))") == "None"
    one.run("import os; os.environ['LATER'] = '1'", env={"ONCE": "1"})
    assert (
        one.printed("import os; print(os.environ.get('ONCE'), os.environ.get('LATER'))")
        == "None None"
    )


def test_an_execution_leaves_no_state_for_the_next(shared: Box) -> None:
    shared.run(
        "import json, sys, builtins\njson.loads = builtins.print = None\nsys.path.clear()\nx = 1"
    )
    result = shared.run("import json\nprint(json.loads('[1]'), 'x' in globals())")
    assert result["stdout"] == "[1] False\n"


def test_random_numbers_differ_between_runs(shared: Box) -> None:
    code = "import random, uuid, secrets\nprint(random.random(), uuid.uuid4(), secrets.token_hex())"
    assert len({shared.printed(code) for _ in range(4)}) == 4
