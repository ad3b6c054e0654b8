"""Whose fault an end was: what others do to an instance is tried again, what code does is not."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.api import Api, eventually
from tests.e2e.test_recovery import handle, runs

if TYPE_CHECKING:
    from tests.harness import Server

pytestmark = pytest.mark.quick

ONCE_MORE = """
import os, time
with open("attempts", "a") as file: file.write("x")
print("begun", flush=True)
while len(open("attempts").read()) < 2: time.sleep(0.01)
print("done")
"""
"""Ends only in its second attempt."""
MARKED = "with open('attempts', 'a') as file: file.write('x')\n"

KILLERS = {
    "every signal to 1": (
        "import os, time\nfor n in range(1, 65):\n"
        "    try: os.kill(1, n)\n    except OSError: pass\n"
        "time.sleep(0.3)\nraise SystemExit(3)"
    ),
    "kill -9 -1": "import os\nos.kill(-1, 9)\nraise SystemExit(3)",
    "kill -TERM -1": "import os, time\nos.kill(-1, 15)\ntime.sleep(60)",
    "zygote": "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(0.5)\nraise SystemExit(3)",
    "zygote in a loop": (
        "import os, subprocess\n"
        "loop = 'for n in $(seq 200); do for p in /proc/[0-9]*; do p=${p#/proc/}; '"
        "       'test $p = $$ || test $p = 1 || kill -9 $p 2>/dev/null; done; done'\n"
        "subprocess.run(['sh', '-c', loop], start_new_session=True)"
    ),
    "memory of everything": (
        "import os\nfor _ in range(8):\n    if os.fork() == 0: break\n"
        "x = []\nwhile True: x.append(bytearray(b'x' * 2**24))"
    ),
}


def terminate(server: Server, api: Api, session: str, number: int) -> int:
    """A signal from outside to the first process of the session's instance; its pid."""
    pid = int(handle(server, api.get(session)["container_id"])["child"])
    os.kill(pid, number)
    return pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_an_executor_terminated_from_outside_is_replaced_and_its_execution_retried(
    api: Api, server: Server, session: str, number: int
) -> None:
    execution_id = api.submit(session, ONCE_MORE, timeout=60)
    events = api.events(execution_id)
    next(name for _, name, _ in events if name == "stdout")
    before = api.get(session)["container_id"]
    pid = terminate(server, api, session, number)

    retried = next(data for _, name, data in events if name == "retry")
    assert retried["attempt"] == 2
    eventually(lambda: not runs(pid))
    shown = api.result(execution_id)
    assert (shown["status"], shown["stdout"]) == ("success", "begun\ndone\n")
    record = api.execution(execution_id)
    assert record["retry_count"] == 1
    lost, last = record["attempts"]
    assert lost["cause"] in ("instance_lost", "evicted", "shutdown")
    assert (lost["container_id"], last["cause"]) == (before, None)
    assert last["container_id"] == api.get(session)["container_id"] != before


def test_an_idle_executor_terminated_from_outside_is_replaced(
    api: Api, server: Server, session: str
) -> None:
    api.put(session, "kept", b"here")
    pid = terminate(server, api, session, signal.SIGTERM)
    eventually(lambda: not runs(pid))

    assert api.run(session, "print(open('kept').read())")["stdout"] == "here\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KILLERS)
def test_code_that_attacks_its_own_sandbox_fails_and_is_not_retried(
    api: Api, session: str, kind: str
) -> None:
    result = api.run(session, MARKED + KILLERS[kind], timeout=20, wait=60)

    assert result["status"] in ("failed", "timeout"), result
    shown = api.execution(result["execution_id"])
    assert shown["retry_count"] == 0
    assert len(shown["attempts"]) == 1
    # A process that is about to die may take the next with it.
    show = "print(open('attempts').read())"
    eventually(lambda: api.run(session, show)["stdout"] == "x\n")
    # As often as one likes.
    again = api.run(session, KILLERS[kind], timeout=20, wait=60)
    assert again["status"] in ("failed", "timeout")
    eventually(lambda: api.run(session, "print(1)")["stdout"] == "1\n")
