"""The executor's journal is PID 1's alone: user code finds neither descriptor nor path to it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import drivers
from tests.e2e.hostile.host import MiB, disk_use, eventually

if TYPE_CHECKING:
    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box

pytestmark = pytest.mark.every_driver

SEARCH = """
import os, sys
wanted = {wanted!r}
found = []

def look(path, status):
    if (status.st_dev, status.st_ino) in wanted:
        found.append(path)

for fd in range(4096):
    try:
        look('fd %d' % fd, os.fstat(fd))
    except OSError:
        pass
for pid in filter(str.isdigit, os.listdir('/proc')):
    for number in range(64):
        path = '/proc/%s/fd/%d' % (pid, number)
        try:
            look(path, os.stat(path))
        except OSError:
            pass
        try:
            os.close(os.open(path, os.O_RDWR))
            if pid == '1':
                found.append('opened ' + path)
        except OSError:
            pass
for top, directories, files in os.walk('/'):
    if top == '/':
        directories.remove('proc')
    for name in files:
        path = os.path.join(top, name)
        try:
            look(path, os.lstat(path))
        except OSError:
            pass
        if name.startswith('journal.') and name[8:].isdigit() and len(name) == 9:
            found.append(path)
print(found)
"""
LEAVE = """
import os, subprocess, time
subprocess.Popen(['sleep', '1000'])
if os.fork() == 0:
    os.setsid()
    time.sleep(1000)
"""
KILL_ZYGOTE = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nsignal.pause()"


def journal(box: Box) -> list[Path]:
    first = drivers.journal(box.server.data_dir, box.instance)
    return sorted(first.parent.glob(f"{first.name.rstrip('0')}[0-9]"))


def identities(box: Box) -> set[tuple[int, int]]:
    found = [path.stat() for path in journal(box)]
    assert len(found) == 2
    return {(status.st_dev, status.st_ino) for status in found}


def holders(box: Box, pids: set[int]) -> list[int]:
    """Which of these processes have a descriptor of the journal, as the host sees them."""
    wanted, found = identities(box), []
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                status = os.stat(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
            if (status.st_dev, status.st_ino) in wanted:
                found.append(pid)
    return found


def test_user_code_finds_no_way_to_the_journal(shared: Box) -> None:
    search = SEARCH.format(wanted=identities(shared))
    # It looks at every file that there is, which may be many and not in memory.
    assert shared.printed(search, timeout=48) == "[]"
    command = ["python3", "-c", search]
    body = {"command": command, "timeout": 48, "wait": 50}
    answer = shared.client.post(f"{shared.url}/execute", json=body)
    assert answer.json()["stdout"].strip() == "[]", answer.text


def test_no_process_but_pid_1_has_the_journal(target: Target, fresh: Box) -> None:
    fresh.run(LEAVE)
    fresh.run(KILL_ZYGOTE)
    assert fresh.printed("print(1)") == "1"
    assert holders(fresh, fresh.processes()) == []
    if target.privileged:
        # An ordinary user's own PID 1 is closed to that user as well.
        assert holders(fresh, {fresh.pid_1}) == [fresh.pid_1] * 2
    assert fresh.printed(SEARCH.format(wanted=identities(fresh)), timeout=48) == "[]"


def test_user_code_cannot_fill_the_journal(fresh: Box) -> None:
    before = disk_use(fresh.workspace)
    flood = "import sys\nfor _ in range(64): sys.stdout.write('x' * 1_000_000)"
    for _ in range(10):
        assert fresh.run(flood)["status"] == "success"
    assert sum(path.stat().st_size for path in journal(fresh)) < 4 * MiB
    assert disk_use(fresh.workspace) - before < 8 * MiB
    fresh.assert_usable()


@pytest.mark.quick
def test_a_full_workspace_does_not_prevent_a_result_in_the_journal(fresh: Box) -> None:
    fill = (
        "import os\nfile = open('full', 'wb', buffering=0)\n"
        "try:\n    while True: file.write(bytes(65536))\n"
        "except OSError: pass\nprint('x' * 1000)"
    )
    size = sum(path.stat().st_size for path in journal(fresh))
    execution = fresh.submit(fill)
    fresh.result(execution)
    eventually(
        lambda: sum(path.stat().st_size for path in journal(fresh)) != size, "the journal's record"
    )
