"""The executor's own processes: out of reach for the code that it runs, and never waited for."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import drivers
from tests.e2e.hostile.conftest import either_variant
from tests.e2e.hostile.host import eventually
from tests.host_processes import living

if TYPE_CHECKING:
    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box

HUNTER = """
import os, signal, sys, time
if os.fork():
    os._exit(0)
leader = os.getppid()
found, seen = [], set()
deadline = time.monotonic() + 60
while len(seen) < 5 and time.monotonic() < deadline:
    parents = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in (1, leader, os.getpid()):
            continue
        for kind, flags in (("mem", os.O_RDWR), ("fd/1", os.O_RDWR), ("fd/2", os.O_WRONLY),
                            ("maps", os.O_RDONLY), ("environ", os.O_RDONLY)):
            try:
                os.close(os.open(f"/proc/{entry}/{kind}", flags))
                # The kernel does not protect one that is ending, which has no memory any more.
                if not open(f"/proc/{entry}/statm").read().startswith("0 "):
                    found.append((kind, open(f"/proc/{entry}/comm").read().strip()))
            except OSError:
                pass
        try:
            stat = open(f"/proc/{entry}/stat").read()
        except OSError:
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]
        if state != "Z":
            parents[int(entry)] = int(parent)
    # A zygote that has its spare child: the next one is to be caught at its birth.
    for pid in {parent for parent in parents.values() if parents.get(parent) == 1} - seen:
        os.kill(pid, signal.SIGKILL)
        seen.add(pid)
with open("hunt", "w") as file:
    print(len(seen), sorted(set(found)), file=file)
os.rename("hunt", "hunted")
"""


@pytest.mark.quick
@pytest.mark.every_driver
def test_no_process_of_the_executor_can_be_opened_even_when_it_starts(fresh: Box) -> None:
    """Memory that can be written is code that runs where no limit of user code holds."""
    fresh.printed(HUNTER)
    eventually(lambda: fresh.client.get(f"{fresh.files}/hunted").is_success, "the hunter")
    seen, _, found = fresh.client.get(f"{fresh.files}/hunted").text.strip().partition(" ")
    assert found == "[]"
    assert int(seen) >= 5
    fresh.assert_usable()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the descriptors of others")
@pytest.mark.skipif(drivers.CHOSEN != "local", reason="of other drivers pids are the engine's")
def test_no_descriptor_of_the_zygote_refers_to_a_file_of_the_host(fresh: Box) -> None:
    # No child is forked ahead before the first execution.
    fresh.assert_usable()
    for pid in fresh.settled():
        places = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        files = {place for place in places if place.startswith("/")}
        # The second is that of an instance's own /dev, seen from outside.
        assert files <= {"/dev/null", "/null"}, (pid, places)


LIMITS = """
import ctypes, os, resource, signal, struct
libc = ctypes.CDLL(None, use_errno=True)
kinds = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
def attempt(what, call):
    try:
        if call() == 0:
            print("changed", what)
    except OSError:
        pass
for kind in sorted(set(kinds)):
    attempt(kind, lambda: resource.prlimit(1, kind, (0, 0)) and 0)
for policy in (5, 3, 1, 2, 0):  # SCHED_IDLE, SCHED_BATCH, SCHED_FIFO, SCHED_RR, SCHED_OTHER
    attempt(policy, lambda: os.sched_setscheduler(1, policy, os.sched_param(0)) or 0)
attempt("affinity", lambda: os.sched_setaffinity(1, {0}) or 0)
for which, who in ((os.PRIO_PROCESS, 1), (os.PRIO_PGRP, 1), (os.PRIO_USER, 0),
                   (os.PRIO_USER, os.getuid())):
    attempt(("priority", which, who), lambda: os.setpriority(which, who, 19) or 0)
for which, who in ((1, 1), (2, 1), (3, os.getuid()), (3, 0)):
    attempt(("io priority", which, who), lambda: libc.syscall(IOPRIO_SET, which, who, 3 << 13))
# As if the host had sent it: a signal whose sender is process 0.
forged = struct.pack("iiiiIi", signal.SIGTERM, 0, -1, 0, 0, 0) + bytes(104)
attempt("sigqueue", lambda: libc.syscall(SIGQUEUE, 1, signal.SIGTERM, forged))
attempt("tgsigqueue", lambda: libc.syscall(TGSIGQUEUE, 1, 1, signal.SIGTERM, forged))
attempt("pidfd", lambda: libc.syscall(424, os.pidfd_open(1), signal.SIGTERM, forged, 0))
# What is the code's own stays its own.
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
os.setpriority(os.PRIO_PROCESS, os.getpid(), 19)
os.sched_setaffinity(os.getpid(), os.sched_getaffinity(0))
os.nice(1)
"""
CALLS = {
    "x86_64": {"IOPRIO_SET": 251, "TGSIGQUEUE": 297, "SIGQUEUE": 129},
    "aarch64": {"IOPRIO_SET": 30, "TGSIGQUEUE": 240, "SIGQUEUE": 138},
}


@pytest.mark.quick
@pytest.mark.every_driver
def test_limits_and_priority_of_pid_1_cannot_be_changed(fresh: Box) -> None:
    code = LIMITS
    for name, number in CALLS[os.uname().machine].items():
        code = code.replace(name, str(number))
    before = fresh.instance
    assert fresh.printed(code) == ""
    # A run that must be ended shows that it can still do its work.
    assert fresh.run("import time\ntime.sleep(600)", timeout=1)["status"] == "timeout"
    fresh.assert_usable()
    assert fresh.instance == before


@either_variant
@pytest.mark.skipif(drivers.CHOSEN != "local", reason="of other drivers pids are the engine's")
def test_an_execution_that_its_executor_does_not_end_is_ended_by_the_control_plane(
    target: Target, fresh: Box
) -> None:
    """Not waited for, and not run again as if the machine had failed."""
    before, pid_1 = fresh.instance, fresh.pid_1
    execution = fresh.submit(
        "import time\nopen('runs', 'a').write('x')\nprint('begun', flush=True)\ntime.sleep(600)",
        timeout=2,
    )
    events = f"/api/v1/executions/{execution}/events"
    with fresh.client.stream("GET", events) as stream:
        next(line for line in stream.iter_lines() if "begun" in line)
    os.kill(pid_1, signal.SIGSTOP)
    result = fresh.result(execution)
    assert (result["status"], result["cause"], result["exit_code"]) == ("timeout", "timeout", 124)
    assert result["stdout"] == "begun\n"
    assert pid_1 not in living()
    fresh.assert_usable()
    assert fresh.instance != before
    assert fresh.client.get(f"{fresh.files}/runs").text == "x"
