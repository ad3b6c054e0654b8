"""
Requests and faults with their times, all derived from a seed.

The same seed gives the same sessions, jobs and faults at the same seconds. Their interleaving
depends on the machine, so a seed that found a defect may have to be run several times.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from enum import StrEnum

from tests import drivers

RATE = 6.0
"""Jobs a second."""
CAPACITIES = (1, 1, 2, 3)
"""Of the sessions."""
FAULT_GAPS = (0.1, 1.4)
"""Seconds between two faults: the least and the most."""
QUIET_AT_FIRST = 0.5
"""Seconds before the first fault."""


class Door(StrEnum):
    """How something is submitted."""

    EXECUTE = "execute"
    WAIT = "execute with wait"
    ASYNC = "async"
    SYNC = "sync"
    STREAM = "stream"


class Naming(StrEnum):
    """What makes a submit safe to repeat, if anything."""

    NOTHING = "nothing"
    ID = "execution_id"
    KEY = "Idempotency-Key"


class Follow(StrEnum):
    """What a client does after its request was accepted."""

    WAIT = "wait for the result"
    READ = "read the events"
    POLL = "poll the status"
    LEAVE = "leave"


class Finish(StrEnum):
    RETURN = "return"
    RAISE = "raise"
    EXIT = "exit"
    HANG = "hang"


class Style(StrEnum):
    SCRIPT = "script"
    HANDLER = "handler"


@dataclass(frozen=True)
class Job:
    number: int
    at: float
    """Seconds after the start."""
    session: int
    steps: int
    pause: float
    """Seconds before each step."""
    finish: Finish
    style: Style
    door: Door
    naming: Naming
    repeats: int
    """How often the same is sent besides, at the same time."""
    follow: Follow
    breaks: tuple[int, ...]
    """A reader disconnects and resumes after each of these numbers of events."""
    cancel_after: float | None
    """Seconds after it was accepted."""
    timeout: float


class Kind(StrEnum):
    KILL_SERVER = "the server is killed"
    END_SERVER = "the server shuts down"
    KILL_BOTH = "the server and an executor are killed"
    KILL_EXECUTOR = "an executor is killed"
    END_EXECUTOR = "an executor gets SIGTERM"
    KILL_INSTANCE = "an instance is killed, all of it"
    KILL_STARTER = "the process that started an instance is killed"
    KILL_ZYGOTE = "a zygote is killed"
    STOP_EXECUTOR = "an executor stands still"
    CUT_LINK = "a link is cut"
    # In a cluster
    EVICT_POD = "a pod is evicted"
    DELETE_POD = "a pod is deleted"
    FORCE_POD = "a pod is deleted without a grace period"
    KILL_API_SERVER = "the API server is killed"
    PAUSE_API_SERVER = "the API server does not answer"
    PAUSE_ETCD = "etcd does not answer"
    KILL_KUBELET = "a kubelet is killed"
    RESTART_CONTAINERD = "a containerd is restarted"
    KILL_MACHINE = "a machine is lost"


PODS = frozenset({Kind.EVICT_POD, Kind.DELETE_POD, Kind.FORCE_POD})
CONTROL_PLANE = frozenset({Kind.KILL_API_SERVER, Kind.PAUSE_API_SERVER, Kind.PAUSE_ETCD})
MACHINES = frozenset({Kind.KILL_KUBELET, Kind.RESTART_CONTAINERD, Kind.KILL_MACHINE})
WEIGHTS = {
    Kind.KILL_SERVER: 5,
    Kind.END_SERVER: 2,
    Kind.KILL_BOTH: 3,
    Kind.KILL_EXECUTOR: 6,
    Kind.END_EXECUTOR: 4,
    Kind.KILL_INSTANCE: 3,
    Kind.KILL_STARTER: 1,
    Kind.KILL_ZYGOTE: 4,
    Kind.STOP_EXECUTOR: 4,
    Kind.CUT_LINK: 5,
}
ON_CLUSTER = {
    Kind.EVICT_POD: 5,
    Kind.DELETE_POD: 2,
    Kind.FORCE_POD: 2,
    Kind.KILL_API_SERVER: 2,
    Kind.PAUSE_API_SERVER: 2,
    Kind.PAUSE_ETCD: 2,
    Kind.KILL_KUBELET: 2,
    Kind.RESTART_CONTAINERD: 2,
    Kind.KILL_MACHINE: 1,
}
if drivers.CHOSEN == "kubernetes":
    WEIGHTS |= ON_CLUSTER
    # Executors of pods ignore SIGTERM at first: EVICT_POD sends it.
    del WEIGHTS[Kind.END_EXECUTOR]
LOSES_INSTANCE = frozenset(
    {Kind.KILL_BOTH, Kind.KILL_EXECUTOR, Kind.END_EXECUTOR, Kind.KILL_INSTANCE, Kind.KILL_MACHINE}
    | PODS
    # What started a container is the engine's, which ends the container with it. As root, the main
    # process of an instance is its PID 1, and no bubblewrap that it could outlive.
    | ({Kind.KILL_STARTER} if drivers.CHOSEN != "local" or os.geteuid() == 0 else set())
)
"""After these an execution may be tried again."""


LASTING = frozenset({Kind.STOP_EXECUTOR}) | CONTROL_PLANE | MACHINES


@dataclass(frozen=True)
class Fault:
    at: float
    kind: Kind
    session: int
    """Whose instance."""
    member: int
    """Which of the servers."""
    seconds: float
    """How long something is down or suspended."""


@dataclass(frozen=True)
class Plan:
    seed: int
    seconds: float
    capacities: tuple[int, ...]
    jobs: tuple[Job, ...]
    faults: tuple[Fault, ...]


def make(seed: int, seconds: float, *, members: int = 1) -> Plan:
    chance = random.Random(seed)
    jobs: list[Job] = []
    at = 0.0
    while (at := at + chance.expovariate(RATE)) < seconds:
        jobs.append(_job(chance, len(jobs), at))
    faults: list[Fault] = []
    at = QUIET_AT_FIRST
    while (at := at + chance.uniform(*FAULT_GAPS)) < seconds:
        (kind,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        # Short, or long enough for the link to be given up.
        still = chance.choice((0.2, 0.6, 2.5))
        # Until it is ready again, or until the cluster has given it up.
        off = chance.choice((0.5, 30.0))
        away = chance.choice((0.0, 0.0, 0.5, 1.0))
        faults.append(
            Fault(
                at=at,
                kind=kind,
                session=chance.randrange(len(CAPACITIES)),
                member=chance.randrange(members),
                seconds=off if kind is Kind.KILL_MACHINE else still if kind in LASTING else away,
            )
        )
    return Plan(seed, seconds, CAPACITIES, tuple(jobs), tuple(faults))


def _job(chance: random.Random, number: int, at: float) -> Job:
    (finish,) = chance.choices(list(Finish), (8, 1, 1, 1))
    (steps, pause) = chance.choice(
        ((0, 0.0), (0, 0.0), (1, 0.1), (20, 0.005), (10, 0.05), (6, 0.25))
    )
    naming = chance.choice(list(Naming))
    door = chance.choice(list(Door))
    if naming is Naming.KEY and door is Door.STREAM:
        door = Door.ASYNC  # A response that is stored for a key is not a live stream.
    hangs = finish is Finish.HANG
    cancelled = chance.random() < (0.2 if steps >= 6 else 0.05)
    return Job(
        number=number,
        at=at,
        session=chance.randrange(len(CAPACITIES)),
        steps=steps,
        pause=pause,
        finish=finish,
        style=chance.choice(list(Style)),
        door=door,
        naming=naming,
        repeats=chance.choice((0, 0, 1, 2)) if naming is not Naming.NOTHING else 0,
        follow=chance.choice(list(Follow)),
        breaks=tuple(chance.randrange(1, 8) for _ in range(chance.randrange(4))),
        cancel_after=chance.uniform(0.0, 1.0) if cancelled else None,
        timeout=chance.choice((0.5, 1.0)) + steps * pause if hangs else 60.0,
    )
