"""
Freezing user code for a moment, so that a list of its files is consistent.

PID 1 stops every other process of the namespace with SIGSTOP, except spared ones and those of
another user, which run no user code. They count as frozen when two scans in a row find all of them
stopped and none has run in between: then there was a moment at which no process could wake or start
another. A process that was already stopped, for example by ^Z, stays stopped.

They continue when the last holder is done or its time is over. Children continue before their
parents, so that no shell considers its job stopped.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import os
import time

from . import processes
from .event_loop import Loop, Timer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    Snapshot = dict[int, "ProcessState"]

MAX_FREEZE = 1.0
"""The longest that stopping all processes may take."""
MAX_HOLD = 10.0
"""The longest that processes stay frozen for one holder."""
SCAN_INTERVAL = 0.001
WAITING_GRACE = 0.2
"""
After this time a process that waits in the kernel counts as stopped, because it may wait for one
that is; and children are stopped although their parents still run.
"""
_STOP_PENDING = 1 << (signal.SIGSTOP - 1)


class ProcessState:
    """One process at the time of a snapshot."""

    __slots__ = ("parent", "ran", "stopped", "waits")

    def __init__(self) -> None:
        self.parent = 0
        self.stopped = True
        """Whether all its threads are stopped."""
        self.waits = False
        """Whether a thread is in the kernel and will stop before it runs user code again."""
        self.ran: dict[int, int] = {}
        """Context switches of each thread."""


class Hold:
    """A request to keep user code frozen. `end` returns whether it was since `ready`."""

    def __init__(self, freezer: Freezer, ready: Callable[[], None], seconds: float) -> None:
        self._freezer = freezer
        self._ready = ready
        self.seconds = seconds
        self.timer: Timer | None = None
        self.good = False
        self.over = False

    def reached(self, good: bool) -> None:
        self.good = good
        if not self.over:
            self._ready()

    def end(self) -> bool:
        if not self.over:
            self._freezer.release(self)
        return self.good


class Freezer:
    def __init__(self, loop: Loop, spared: Callable[[], frozenset[int]]) -> None:
        self._loop = loop
        self._spared = spared
        self._holds: list[Hold] = []
        self._first: Snapshot = {}
        """Processes before any was stopped."""
        self._frozen: Snapshot | None = None
        """Processes when all were frozen."""

    @property
    def wanted(self) -> bool:
        return bool(self._holds)

    def hold(self, ready: Callable[[], None], seconds: float) -> Hold:
        """
        Freeze user code. `ready` is called when it is frozen or cannot be, maybe before this
        returns.
        """
        hold = Hold(self, ready, seconds)
        if os.getpid() != 1 or not _is_supported():
            hold.over = True
            ready()
            return hold
        self._holds.append(hold)
        if self._frozen is not None:
            self._reached(hold)
        elif len(self._holds) == 1:
            self._begin()
        return hold

    def disturb(self) -> None:
        """The executor itself changed files: a list of them is not consistent."""
        for hold in self._holds:
            hold.good = False

    def release(self, hold: Hold) -> None:
        if hold.good and not self._still_frozen():
            hold.good = False
        self._remove(hold)

    def _expire(self, hold: Hold) -> None:
        hold.good = False
        self._remove(hold)

    def _remove(self, hold: Hold) -> None:
        hold.over = True
        if hold.timer is not None:
            hold.timer.cancel()
        if hold in self._holds:
            self._holds.remove(hold)
            if not self._holds:
                self._resume()

    # Freeze

    def _begin(self) -> None:
        self._first = snapshot(self._spared())
        self._scan(time.monotonic(), {})

    def _scan(self, begun: float, before: Snapshot) -> None:
        if not self._holds:
            return
        now = snapshot(self._spared())
        late = time.monotonic() - begun
        moving = [pid for pid, found in now.items() if not _is_stopped(found, late)]
        if not moving and _same(now, before):
            self._frozen = now
            for hold in list(self._holds):
                self._reached(hold)
            return
        if late > MAX_FREEZE:
            self._give_up()
            return
        for pid in moving:
            above = now.get(now[pid].parent)
            # Parents before their children, so that no parent sees that a child was stopped. Not
            # for long, because user code may wake any process.
            if above is None or above.stopped or late > WAITING_GRACE:
                processes.send(pid, signal.SIGSTOP)
        wait = SCAN_INTERVAL if moving else 0
        self._loop.after(wait, lambda: self._scan(begun, {} if moving else now))

    def _give_up(self) -> None:
        holds, self._holds = self._holds, []
        self._resume()
        for hold in holds:
            hold.reached(False)
            hold.over = True

    def _reached(self, hold: Hold) -> None:
        hold.timer = self._loop.after(hold.seconds, lambda: self._expire(hold))
        hold.reached(True)

    # Resume

    def _still_frozen(self) -> bool:
        """Whether no process has run since all were frozen; some may have been killed."""
        frozen = self._frozen or {}
        return all(
            pid in frozen and found.ran == frozen[pid].ran
            for pid, found in snapshot(self._spared()).items()
        )

    def _resume(self) -> None:
        first, frozen, self._first, self._frozen = self._first, self._frozen, {}, None
        spared = self._spared()
        now = snapshot(spared)
        for level in reversed(_levels(now)):
            for pid in level:
                if not _was_stopped(pid, first, frozen or now):
                    processes.send(pid, signal.SIGCONT)


def _was_stopped(pid: int, first: Snapshot, frozen: Snapshot) -> bool:
    """Whether it was stopped already and was not woken before all were frozen."""
    begun, later = first.get(pid), frozen.get(pid)
    return begun is not None and begun.stopped and later is not None and later.ran == begun.ran


def _is_stopped(found: ProcessState, late: float) -> bool:
    return found.stopped or (found.waits and late > WAITING_GRACE)


def _same(now: Snapshot, before: Snapshot) -> bool:
    return now.keys() == before.keys() and all(
        found.ran == before[pid].ran for pid, found in now.items()
    )


def snapshot(spared: frozenset[int]) -> Snapshot:
    """Every living process of the namespace except PID 1 and the spared ones."""
    found: Snapshot = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and entry != "1" and int(entry) not in spared:
            process = _read_state(entry)
            if process.ran:
                found[int(entry)] = process
    return found


def _is_supported() -> bool:
    """Whether the kernel reports context switches; gVisor does not."""
    with open("/proc/self/status", "rb") as file:
        return b"\nvoluntary_ctxt_switches:" in file.read()


def _read_state(pid: str) -> ProcessState:
    found = ProcessState()
    try:
        threads = os.listdir("/proc/%s/task" % pid)
    except OSError:
        return found
    for thread in threads:
        try:
            with open("/proc/%s/task/%s/status" % (pid, thread), "rb") as file:
                fields = dict(line.split(b":", 1) for line in file.read().split(b"\n") if line)
        except OSError:
            continue  # Ended since it was listed.
        if int(fields[b"Uid"].split()[0]) != os.getuid():
            break
        state = fields[b"State"].split()[0]
        if state in b"ZX":
            continue
        switches = int(fields[b"voluntary_ctxt_switches"])
        found.ran[int(thread)] = switches + int(fields[b"nonvoluntary_ctxt_switches"])
        found.parent = int(fields[b"PPid"])
        if state not in b"Tt":
            found.stopped = False
            pending = int(fields[b"SigPnd"], 16) | int(fields[b"ShdPnd"], 16)
            found.waits = state == b"D" and bool(pending & _STOP_PENDING)
    return found


def _levels(found: Snapshot) -> list[list[int]]:
    """Processes by their depth in the tree, the topmost first."""
    below: dict[int, list[int]] = {}
    for pid, process in found.items():
        above = process.parent if process.parent in found else 0
        below.setdefault(above, []).append(pid)
    levels: list[list[int]] = []
    level = below.get(0, [])
    while level and len(levels) <= len(found):
        levels.append(level)
        level = [child for pid in level for child in below.get(pid, ())]
    return levels
