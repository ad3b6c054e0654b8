"""
Runs a server that leaves processes and mounts behind, and removes all of them in the end.

Started as `reaper.py DIRECTORY CGROUP`, it reads commands from its standard input, one per line:
`run` with a command in JSON starts it, with the error output as its log, and responds with its
process id; `kill` kills all its descendants, and responds when they have ended. When the input
ends, also because the tests were killed, it kills them, unmounts everything in the directory, and
removes that and the control groups.

Orphaned descendants become its children, so it knows all of them without the server.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
CGROUPS = Path("/sys/fs/cgroup")


def main(place: Path, cgroup: str) -> None:
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("This kernel lets no process adopt the children of others.")
    signal.signal(signal.SIGCHLD, _reap)
    for line in sys.stdin:
        verb, _, rest = line.partition(" ")
        if verb == "run":
            started = subprocess.Popen(json.loads(rest), stdin=subprocess.DEVNULL, stdout=2)
            print(started.pid, flush=True)
        else:
            kill(place, cgroup)
            print("killed", flush=True)
    kill(place, cgroup)
    clean(place, cgroup)


def kill(place: Path, cgroup: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with suppress(ChildProcessError):
        while True:
            # Again after each: one may have been started while they were listed.
            for pid in descendants():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            thaw(cgroup)
            os.waitpid(-1, 0)
    signal.signal(signal.SIGCHLD, _reap)
    # Where containerd's shims listen, which is outside of every directory that one can name.
    for address in place.glob("exec/containerd/daemon/*/*/*/address"):
        Path(address.read_text().removeprefix("unix://")).unlink(missing_ok=True)


def clean(place: Path, cgroup: str) -> None:
    for mounted in reversed(mounts(place)):
        subprocess.run(["umount", "--lazy", mounted], check=True)
    # Remaining mounts are not ours to remove.
    assert not mounts(place), mounts(place)
    shutil.rmtree(place)
    for group in cgroups(cgroup):
        group.rmdir()


def descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(FileNotFoundError, ProcessLookupError):
                # The name of the program comes before, in parentheses, and may hold anything.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        new = children.get(todo.pop(), [])
        found += new
        todo += new
    return found


def thaw(cgroup: str) -> None:
    """Processes of a paused container do not even die before that."""
    for group in cgroups(cgroup):
        for name, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            # Opened for reading too, which creates no file.
            try:
                with (group / name).open("r+") as file:
                    file.write(value)
            except OSError as error:
                # Another process may remove the second file of a group concurrently.
                if error.errno not in (errno.ENOENT, errno.ENODEV):
                    raise


def cgroups(name: str) -> Iterator[Path]:
    """In every hierarchy, inner ones first."""
    for top in (CGROUPS / name, *CGROUPS.glob(f"*/{name}")):
        for directory, _, _ in os.walk(top, topdown=False):
            yield Path(directory)


def mounts(place: Path) -> list[str]:
    """In the order in which they were mounted."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4] for line in lines]
    return [point for point in points if Path(point).is_relative_to(place)]


def _reap(number: int, frame: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
