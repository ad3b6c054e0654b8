"""The host's processes are out of sight, the executor's survive, nothing outlives its run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests import drivers
from tests.e2e.hostile.host import eventually
from tests.host_processes import below, processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box

TREE = """
import os, signal, sys, time
def sleeper():
    {prelude}
    time.sleep(600)
    os._exit(0)
{start}
print("started", flush=True)
time.sleep(600)
"""

SURVIVORS = {
    "a child": ("pass", "if os.fork() == 0: sleeper()"),
    "a daemon by two forks": (
        "pass",
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: sleeper()\n    os._exit(0)",
    ),
    "a process group of its own": ("os.setpgid(0, 0)", "if os.fork() == 0: sleeper()"),
    "one that ignores every signal": (
        "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 10, 12, 13, 14, 15, 20)]",
        "if os.fork() == 0: sleeper()",
    ),
    "a chain of forty": (
        "pass",
        "for _ in range(40):\n    if os.fork() != 0: time.sleep(600)\nsleeper()",
    ),
    "one that closed its streams": (
        "os.closerange(0, 64)",
        "if os.fork() == 0: sleeper()",
    ),
    "a stopped one": ("os.kill(os.getpid(), signal.SIGSTOP)", "if os.fork() == 0: sleeper()"),
    "a thread that forks": (
        "pass",
        "import threading\nthreading.Thread(target=lambda: os.fork() or sleeper()).start()",
    ),
}


@pytest.fixture
def victim(target: Target) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the host that waits to be found."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.quick
@pytest.mark.every_driver
def test_host_processes_are_invisible(shared: Box, victim: subprocess.Popen[bytes]) -> None:
    seen = shared.printed(
        "import os\n"
        "for entry in os.listdir('/proc'):\n"
        "    if entry.isdigit(): print(entry, open(f'/proc/{entry}/comm').read().strip())"
    ).splitlines()
    names = {line.split(None, 1)[1] for line in seen}
    assert "sleep" not in names
    assert len(seen) <= 4, seen


@pytest.mark.quick
def test_host_processes_cannot_be_signalled(
    target: Target, shared: Box, victim: subprocess.Popen[bytes]
) -> None:
    pids = [victim.pid, target.pid, os.getpid(), shared.pid_1, *shared.processes()]
    code = f"""
import os, signal
mine = [int(entry) for entry in os.listdir('/proc') if entry.isdigit()]
for pid in {pids!r}:
    if pid in mine:
        continue
    for call in (lambda: os.kill(pid, signal.SIGKILL), lambda: os.killpg(pid, signal.SIGKILL),
                 lambda: os.pidfd_open(pid)):
        try:
            call()
            print("reached", pid)
        except OSError:
            pass
"""
    assert shared.printed(code) == ""
    assert victim.poll() is None
    assert target.client.get("/health").status_code == 200


@pytest.mark.quick
@pytest.mark.every_driver
@pytest.mark.parametrize("number", [1, 2, 3, 4, 6, 9, 11, 15, 19, 20, 23, 24, 31, 34, 64])
def test_pid_1_ignores_signals(shared: Box, number: int) -> None:
    before = shared.instance
    shared.run(f"import os\nos.kill(1, {number})")
    shared.assert_usable()
    assert shared.instance == before
    assert processes()[shared.pid_1][1] not in "TtZX"


@pytest.mark.quick
def test_pid_1_cannot_be_read_or_traced(shared: Box) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for kind in ("mem", "maps", "environ", "root", "cwd", "exe", "fd", "fdinfo", "ns/mnt", "auxv",
             "stack", "io", "map_files", "pagemap", "syscall", "personality", "clear_refs"):
    place = f"/proc/1/{kind}"
    for attempt in (os.listdir, os.readlink, lambda path: open(path, "rb").read(1),
                    lambda path: open(path, "r+b")):
        try:
            attempt(place)
            print("open", place)
        except OSError:
            pass
for pid in (1, os.getppid()):
    for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
        if libc.ptrace(request, pid, 0, 0) == 0:
            print("traced", pid)
try:
    os.write(os.open("/proc/1/oom_score_adj", os.O_WRONLY), b"1000")
    print("wrote", pid)
except OSError:
    pass
"""
    assert shared.printed(code) == ""


@pytest.mark.every_driver
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV])
def test_a_signal_to_the_zygote_ends_the_execution_but_not_the_session(
    fresh: Box, number: signal.Signals
) -> None:
    started = time.monotonic()
    result = fresh.run(
        f"import os, time\nos.kill(os.getppid(), {int(number)})\ntime.sleep(2)", timeout=6
    )
    assert time.monotonic() - started < 20
    assert result["status"] in ("success", "failed", "timeout")
    fresh.assert_usable()
    fresh.settled()


@pytest.mark.every_driver
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_signal_to_the_waiting_child_does_not_stop_the_session(
    fresh: Box, number: signal.Signals
) -> None:
    code = f"""
import os, time
zygote, leader = os.getppid(), os.getpid()
if os.fork() == 0:
    # In the background, until there is a child that waits for the next run.
    known = (1, zygote, leader, os.getpid())
    found = []
    while not found:
        time.sleep(0.005)
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        found = [pid for pid in pids if pid not in known]
    for pid in found:
        os.kill(pid, {int(number)})
    open("done", "w").close()
"""
    fresh.printed(code)
    # Until then it may be one of the two that are left.
    eventually(lambda: fresh.client.get(f"{fresh.files}/done").is_success, "a signal")
    fresh.settled()
    assert fresh.printed("print('next')", timeout=10) == "next"
    fresh.assert_usable()


def test_a_signal_to_all_processes_does_not_stop_the_session(fresh: Box) -> None:
    for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM):
        fresh.run(f"import os\nos.kill(-1, {int(number)})", timeout=5)
        fresh.assert_usable()
    fresh.settled()


@pytest.mark.every_driver
def test_code_that_kills_its_own_process_group_gets_a_result(fresh: Box) -> None:
    result = fresh.run("import os, signal\nprint('x', flush=True)\nos.killpg(0, signal.SIGKILL)")
    assert (result["status"], result["signal"]) == ("failed", "SIGKILL")
    assert result["stdout"] == "x\n"
    fresh.assert_usable()


@pytest.mark.every_driver
@pytest.mark.parametrize("kind", SURVIVORS)
def test_no_process_outlives_a_timeout(fresh: Box, kind: str) -> None:
    prelude, start = SURVIVORS[kind]
    result = fresh.run(TREE.format(prelude=prelude, start=start), timeout=1.5)
    assert (result["status"], result["cause"]) == ("timeout", "timeout")
    assert result["exit_code"] == 124
    fresh.settled()
    fresh.assert_usable()


@pytest.mark.quick
@pytest.mark.every_driver
@pytest.mark.parametrize("kind", ["a child", "one that ignores every signal", "a stopped one"])
def test_no_process_outlives_a_cancellation(fresh: Box, kind: str) -> None:
    prelude, start = SURVIVORS[kind]
    execution = fresh.submit(TREE.format(prelude=prelude, start=start), timeout=60)
    eventually(lambda: len(fresh.processes()) >= 3, "the child")
    answer = fresh.client.post(f"/api/v1/executions/{execution}/cancel")
    assert answer.json()["status"] == "cancelled"
    fresh.settled()
    fresh.assert_usable()


SWARM = """
import os, signal, time
# Each wakes all others, forks and goes: whoever is stopped or found is not there any more.
def live():
    while True:
        try:
            if os.fork() != 0 and os.getpid() != leader:
                os._exit(0)
        except OSError:
            pass
        try:
            os.kill(-1, signal.SIGCONT)
        except OSError:
            pass
leader = os.getpid()
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(6):
    if os.fork() == 0:
        live()
{leader}
"""


@pytest.mark.quick
@pytest.mark.every_driver
@pytest.mark.parametrize("leader", ["time.sleep(600)", "live()"], ids=["waits", "joins in"])
def test_processes_that_respawn_each_other_end_at_the_timeout(fresh: Box, leader: str) -> None:
    result = fresh.run(SWARM.format(leader=leader), timeout=2)
    assert result["status"] == "timeout"
    fresh.settled()
    fresh.assert_usable()


@pytest.mark.every_driver
def test_code_can_start_as_many_processes_as_its_session_allows(fresh: Box) -> None:
    code = """
import os, time
made = 1
try:
    while os.fork():
        made += 1
    time.sleep(600)
except OSError as error:
    print(made, error.strerror)
"""
    made, why = fresh.printed(code).split(" ", 1)
    assert why == "Resource temporarily unavailable"
    # A spare child that waits for the next execution is one of them.
    assert int(made) in (47, 48)


@pytest.mark.every_driver
def test_a_fork_bomb_is_bounded_and_ends(boxes: Callable[..., Box]) -> None:
    # Its processes take up to 100 MiB together, most of it the kernel's, and with Docker the
    # executor's memory counts too: with less it may end for memory first.
    fresh = boxes(memory="512Mi", max_processes=48)
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    execution = fresh.submit(bomb, timeout=10)
    status = f"/api/v1/executions/{execution}/status"
    pid_1, most = fresh.pid_1, 0
    eventually(lambda: len(below(pid_1)) > 10, "the bomb")
    while fresh.client.get(status).json()["status"] in ("pending", "running"):
        most = max(most, len(below(pid_1)))
    assert 10 < most <= 48 + drivers.SPARE, most
    result = fresh.result(execution)
    assert result["status"] == "timeout", str(result)
    fresh.settled()
    fresh.assert_usable()


def test_a_fork_bomb_in_the_background_does_not_block_later_executions(
    target: Target, fresh: Box
) -> None:
    fresh.run(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    while True:\n"
        "        try:\n"
        "            if os.fork() == 0: time.sleep(600)\n"
        "        except OSError: time.sleep(0.01)\n"
    )
    started = time.monotonic()
    result = fresh.run("print(1)", timeout=3)
    assert result["status"] in ("success", "timeout", "failed", "error"), result
    result = fresh.run("print(1)", timeout=3)
    assert result["status"] in ("success", "timeout", "failed", "error"), result
    assert time.monotonic() - started < 25
    pid_1 = fresh.pid_1
    target.client.delete(fresh.url)
    eventually(lambda: pid_1 not in processes(), "the end of PID 1")


@pytest.mark.quick
@pytest.mark.every_driver
def test_threads_are_bounded_too(fresh: Box) -> None:
    code = """
import threading
stop = threading.Event()
made = 0
try:
    for _ in range(500):
        threading.Thread(target=stop.wait, daemon=True).start()
        made += 1
except RuntimeError:
    pass
print(made)
stop.set()
"""
    assert int(fresh.printed(code)) <= 48 + drivers.SPARE
    fresh.assert_usable()


def test_a_daemon_ends_with_its_session(target: Target, fresh: Box) -> None:
    fresh.printed(
        "import os, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    os.closerange(0, 64)\n    time.sleep(600)"
    )
    pid_1 = fresh.pid_1

    def all_three() -> set[int]:
        found = below(pid_1)
        return found if len(found) == 3 else set()

    # The spare child for the next run is forked after the result is sent.
    inside = eventually(all_three, "the daemon, the zygote and one that waits")
    fresh.assert_usable()
    target.client.delete(fresh.url)
    eventually(lambda: not (inside | {pid_1}) & set(processes()), "the end of all of them")


@pytest.mark.every_driver
def test_a_session_can_be_deleted_while_code_runs(
    target: Target, boxes: Callable[..., Box]
) -> None:
    box = boxes()
    execution = box.submit(TREE.format(prelude="pass", start="if os.fork() == 0: sleeper()"))
    events = f"/api/v1/executions/{execution}/events"
    with box.client.stream("GET", events) as stream:
        assert "event: stdout" in stream.iter_lines()
    pid_1, name = box.pid_1, box.workspace_name
    inside = below(pid_1)
    answer = target.client.delete(box.url).json()
    assert (answer["status"], answer["cause"]) == ("terminated", "user")
    result = box.result(execution)
    assert (result["status"], result["cause"]) == ("error", "user")
    assert result["stdout"] == "started\n"
    eventually(lambda: not (inside | {pid_1}) & set(processes()), "the end of all of them")
    directory = target.server.data_dir / "node"
    eventually(lambda: not (directory / "workspaces" / name).exists(), "the end of the workspace")
    again = target.client.post(f"{box.url}/execute", json={"code": "print(1)"})
    assert (again.status_code, again.json()["code"]) == (409, "session_ended")
