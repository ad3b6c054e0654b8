"""
User code that stands still for a moment, so that a list of its files is of that moment.

PID 1 stops every other process of the namespace but those it is told to spare, and those of another
user, which are not user code and which it could not stop. They do stand still
when two looks in a row find all of them stopped and none has run in between: then there was a
moment at which nobody could wake or make anybody. A process that was stopped before, as by ^Z,
stays so. They go on, children before parents, so that no shell takes its job for stopped: when the
last who wanted it is done, or when the time is over, whatever became of those who wanted it.
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

    Look = dict[int, "Standing"]

REACH_SECONDS = 1.0
"""The longest that it may take until all stand still."""
HOLD_SECONDS = 10.0
"""The longest that they stand still for one who wants it."""
LOOK_SECONDS = 0.001
PATIENCE_SECONDS = 0.2
"""
After so long, one that waits in the kernel counts as stopped: it may wait for one who is. And none
is spared any longer for its parent's sake.
"""
_STOP_PENDING = 1 << (signal.SIGSTOP - 1)


class Standing:
    """What a look tells of a process."""

    __slots__ = ("parent", "ran", "stopped", "waits")

    def __init__(self) -> None:
        self.parent = 0
        self.stopped = True
        """Whether all its threads are."""
        self.waits = False
        """Whether one of them is in the kernel and will stop before it runs user code."""
        self.ran: dict[int, int] = {}
        """How often each thread was given a processor."""


class Hold:
    """One who wants all to stand still; `end` says whether they did, from `ready` on until then."""

    def __init__(
        self, standstill: Standstill, ready: Callable[[bool], None], seconds: float
    ) -> None:
        self._standstill = standstill
        self._ready = ready
        self.seconds = seconds
        self.timer: Timer | None = None
        self.good = False
        self.over = False

    def reached(self, good: bool) -> None:
        self.good = good
        if not self.over:
            self._ready(good)

    def end(self) -> bool:
        if not self.over:
            self._standstill.leave(self)
        return self.good


class Standstill:
    def __init__(self, loop: Loop, spared: Callable[[], frozenset[int]]) -> None:
        self._loop = loop
        self._spared = spared
        self._holds: list[Hold] = []
        self._first: Look = {}
        """As they were before anything was done to them."""
        self._still: Look | None = None
        """As they were when all stood still."""

    @property
    def wanted(self) -> bool:
        return bool(self._holds)

    def hold(self, ready: Callable[[bool], None], seconds: float) -> Hold:
        """Have all stand still; `ready` is told whether they do, and may be before this returns."""
        hold = Hold(self, ready, seconds)
        if os.getpid() != 1 or not _is_told():
            hold.over = True
            ready(False)
            return hold
        self._holds.append(hold)
        if self._still is not None:
            self._reached(hold)
        elif len(self._holds) == 1:
            self._begin()
        return hold

    def disturb(self) -> None:
        """Something of ours changed files: what is listed is not of one moment."""
        for hold in self._holds:
            hold.good = False

    def leave(self, hold: Hold) -> None:
        if hold.good and not self._unmoved():
            hold.good = False
        self._let_go(hold)

    def _expire(self, hold: Hold) -> None:
        hold.good = False
        self._let_go(hold)

    def _let_go(self, hold: Hold) -> None:
        hold.over = True
        if hold.timer is not None:
            hold.timer.cancel()
        if hold in self._holds:
            self._holds.remove(hold)
            if not self._holds:
                self._go_on()

    # Down

    def _begin(self) -> None:
        self._first = look(self._spared())
        self._look_again(time.monotonic(), {})

    def _look_again(self, begun: float, before: Look) -> None:
        if not self._holds:
            return
        now = look(self._spared())
        late = time.monotonic() - begun
        moving = [pid for pid, found in now.items() if not _stands(found, late)]
        if not moving and _same(now, before):
            self._still = now
            for hold in list(self._holds):
                self._reached(hold)
            return
        if late > REACH_SECONDS:
            self._give_up()
            return
        for pid in moving:
            above = now.get(now[pid].parent)
            # Parents before their children: who waits for a child's end is not told that it was
            # stopped. Not for long: user code may wake whom it likes.
            if above is None or above.stopped or late > PATIENCE_SECONDS:
                processes.send(pid, signal.SIGSTOP)
        wait = LOOK_SECONDS if moving else 0
        self._loop.after(wait, lambda: self._look_again(begun, {} if moving else now))

    def _give_up(self) -> None:
        holds, self._holds = self._holds, []
        self._go_on()
        for hold in holds:
            hold.reached(False)
            hold.over = True

    def _reached(self, hold: Hold) -> None:
        hold.timer = self._loop.after(hold.seconds, lambda: self._expire(hold))
        hold.reached(True)

    # Up

    def _unmoved(self) -> bool:
        """Whether none has run since all stood still; some may have been ended, which is no run."""
        still = self._still or {}
        return all(
            pid in still and found.ran == still[pid].ran
            for pid, found in look(self._spared()).items()
        )

    def _go_on(self) -> None:
        first, still, self._first, self._still = self._first, self._still, {}, None
        spared = self._spared()
        now = look(spared)
        for level in reversed(_levels(now)):
            for pid in level:
                if not _was_stopped(pid, first, still or now):
                    processes.send(pid, signal.SIGCONT)


def _was_stopped(pid: int, first: Look, still: Look) -> bool:
    """Whether it stood still already, and was not woken before all did."""
    begun, later = first.get(pid), still.get(pid)
    return begun is not None and begun.stopped and later is not None and later.ran == begun.ran


def _stands(found: Standing, late: float) -> bool:
    return found.stopped or (found.waits and late > PATIENCE_SECONDS)


def _same(now: Look, before: Look) -> bool:
    return now.keys() == before.keys() and all(
        found.ran == before[pid].ran for pid, found in now.items()
    )


def look(spared: frozenset[int]) -> Look:
    """Every living process of the namespace but PID 1 and those."""
    found: Look = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and entry != "1" and int(entry) not in spared:
            standing = _look_at(entry)
            if standing.ran:
                found[int(entry)] = standing
    return found


def _is_told() -> bool:
    """Whether the kernel tells what a look takes: gVisor does not."""
    with open("/proc/self/status", "rb") as file:
        return b"\nvoluntary_ctxt_switches:" in file.read()


def _look_at(pid: str) -> Standing:
    standing = Standing()
    try:
        threads = os.listdir("/proc/%s/task" % pid)
    except OSError:
        return standing
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
            continue  # Of a process with others yet, or with nobody.
        switches = int(fields[b"voluntary_ctxt_switches"])
        standing.ran[int(thread)] = switches + int(fields[b"nonvoluntary_ctxt_switches"])
        standing.parent = int(fields[b"PPid"])
        if state not in b"Tt":
            standing.stopped = False
            pending = int(fields[b"SigPnd"], 16) | int(fields[b"ShdPnd"], 16)
            standing.waits = state == b"D" and bool(pending & _STOP_PENDING)
    return standing


def _levels(found: Look) -> list[list[int]]:
    """Processes by how far they are below those at the top, the highest first."""
    below: dict[int, list[int]] = {}
    for pid, standing in found.items():
        above = standing.parent if standing.parent in found else 0
        below.setdefault(above, []).append(pid)
    levels: list[list[int]] = []
    level = below.get(0, [])
    while level and len(levels) <= len(found):
        levels.append(level)
        level = [child for pid in level for child in below.get(pid, ())]
    return levels
