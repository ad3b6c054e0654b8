"""Code that keeps running and writing while it is paused and while its files are listed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.hostile.host import eventually
from tests.host_processes import below

if TYPE_CHECKING:
    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box

pytestmark = pytest.mark.every_driver

RESTLESS = """
import os, signal, threading
def say(n):
    with open('.n', 'w') as f: f.write(str(n))
    os.replace('.n', 'n')
say(0)
for number in set(range(1, 65)) - {9, 17, 19, 32, 33}:
    signal.signal(number, signal.SIG_IGN)
def spin():
    while True: pass
if os.fork() == 0:
    while True: os.kill(-1, signal.SIGCONT)
if os.fork() == 0:
    while True:
        pid = os.fork()
        if pid == 0: os._exit(0)
        os.waitpid(pid, 0)
for _ in range(4):
    threading.Thread(target=spin, daemon=True).start()
n = 0
while True:
    n += 1
    say(n)
"""


def ticks(pids: set[int]) -> dict[int, tuple[str, str]]:
    found = {}
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[pid] = (fields[11], fields[12])
    return found


def used(top: int) -> dict[int, tuple[str, str]]:
    """The ticks of all that is inside, once what ran until now is counted."""

    def same() -> dict[int, tuple[str, str]]:
        before = ticks(below(top) | {top})
        time.sleep(0.1)
        return before if ticks(below(top) | {top}) == before else {}

    found: dict[int, tuple[str, str]] = eventually(same, "an end of what it uses")
    return found


def begun(box: Box) -> str:
    execution = box.submit(RESTLESS, timeout=120)
    eventually(lambda: box.client.get(f"{box.files}/n").status_code == 200, "its first file")
    return execution


def assert_still_running(box: Box) -> None:
    seen = box.client.get(f"{box.files}/n").text
    eventually(lambda: box.client.get(f"{box.files}/n").text != seen, "more of what it counts")


def cancel(box: Box, execution: str) -> None:
    assert box.client.post(f"/api/v1/executions/{execution}/cancel").status_code == 200


def test_code_that_keeps_writing_does_not_prevent_a_checkpoint(fresh: Box) -> None:
    execution = begun(fresh)
    for _ in range(3):
        saved = fresh.client.post(f"{fresh.url}/checkpoint")
        assert saved.status_code in (200, 201), saved.text
        assert_still_running(fresh)
    cancel(fresh, execution)
    fresh.assert_usable()


def leave_running(box: Box) -> None:
    """Restless code that its execution left behind."""
    box.run("import os\nif os.fork() == 0:\n    exec(" + repr(RESTLESS) + ")")
    eventually(lambda: box.client.get(f"{box.files}/n").status_code == 200, "its first file")


@pytest.mark.quick
def test_busy_code_uses_no_cpu_while_it_is_paused(target: Target, fresh: Box) -> None:
    leave_running(fresh)
    top = fresh.pid_1
    paused = fresh.client.post(f"{fresh.url}/pause")
    if not target.privileged:
        assert (paused.status_code, paused.json()["code"]) == (409, "pause_unavailable")
        assert_still_running(fresh)
        return
    assert paused.status_code == 200, paused.text
    before = used(top)
    begin = time.process_time()
    while time.process_time() - begin < 0.3:
        pass
    assert ticks(below(top) | {top}) == before
    started = fresh.client.post(f"{fresh.url}/start")
    assert started.status_code == 200, started.text
    assert fresh.pid_1 == top
    assert_still_running(fresh)


def test_a_paused_session_with_busy_code_can_be_ended(target: Target) -> None:
    if not target.privileged:
        pytest.skip("instances of this node cannot be paused")
    box = target.box(memory="128Mi", disk="32Mi", max_processes=48)
    leave_running(box)
    top = box.pid_1
    assert box.client.post(f"{box.url}/pause").status_code == 200
    inside = below(top) | {top}
    assert box.client.delete(box.url).status_code < 300
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in inside), "their end")
