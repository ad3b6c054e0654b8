"""Servers to attack: one that runs as root, and one that runs as an ordinary user."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import drivers, unprivileged
from tests.e2e.hostile.host import Box
from tests.harness import Server

SECRET = "the-server's-own-secret"
KNOWN = ("Response content shorter than Content-Length", 'File "/usr/local/bin/python3"')
"""
Of a file that shrinks while it is sent: uvicorn cuts the connection by an exception. And of a
hostile image's own program, whose output the log of a failed start may quote.
"""
VARIANTS = ["root", "unprivileged"] if os.geteuid() == 0 else ["unprivileged"]
if drivers.CHOSEN != "local":
    # A user who may use a Docker engine or a cluster needs no other rights.
    VARIANTS = ["root"]
either_variant = pytest.mark.parametrize("target", VARIANTS[:1], indirect=True, scope="module")
"""For attacks on the executor, which is the same program for root and for an ordinary user."""
SMALL = {"memory": "128Mi", "disk": "32Mi", "max_processes": 48}


class RootServer(Server):
    """A separate process: its secret is in /proc, where hostile code would look for it."""

    preloaded = False


@dataclass
class Target:
    """A running server with the means to attack it."""

    privileged: bool
    server: Server
    client: httpx.Client
    home: Path
    """A directory beside the data directory, of the same owner."""

    def box(self, **request: Any) -> Box:
        answer = self.client.post("/api/v1/sessions", json={"timeout": 600, **request})
        assert answer.status_code == 201, answer.text
        return Box(self.server, self.client, answer.json())

    @property
    def own_disk(self) -> bool:
        """Whether each workspace has its own file system."""
        return self.privileged

    @property
    def pid(self) -> int:
        assert self.server.process is not None
        return self.server.process.pid


@pytest.fixture(scope="session")
def targets(
    bubblewrap: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Target]]:
    """The servers by variant, each started by the first test that needs it."""
    with ExitStack() as stack:

        @cache
        def started(variant: str) -> Target:
            return stack.enter_context(attackable(variant, tmp_path_factory.mktemp("hostile")))

        yield started


@pytest.fixture(scope="module", params=VARIANTS)
def target(request: pytest.FixtureRequest, targets: Callable[[str], Target]) -> Target:
    return targets(request.param)


@contextmanager
def attackable(variant: str, home: Path, **settings: str) -> Iterator[Target]:
    """A separate server with these settings."""
    if variant == "root":
        yield from _attackable(RootServer, home, privileged=True, **settings)
        return
    unprivileged.require()
    with unprivileged.directory() as directory:
        kind = unprivileged.UnprivilegedServer
        yield from _attackable(kind, directory, privileged=False, **settings)


def _attackable(
    kind: type[Server], home: Path, *, privileged: bool, **settings: str
) -> Iterator[Target]:
    data_dir = home / "data"
    data_dir.mkdir(mode=0o700)
    if unprivileged.ROOT and not privileged:
        os.chown(data_dir, unprivileged.UID, unprivileged.UID)
    env = {"HOME": str(home), "SECRET": SECRET, **settings}
    if not privileged:
        env |= unprivileged.environment(home)
    with kind(data_dir, **env) as server, server.client() as client:
        client.timeout = httpx.Timeout(90)
        yield Target(privileged, server, client, home)
        log = server.stderr()
    traces = log.split("Traceback (most recent call last)")[1:]
    assert [trace for trace in traces if not any(known in trace for known in KNOWN)] == []


@pytest.fixture(scope="module")
def shared(target: Target) -> Iterator[Box]:
    """A session for cases that leave nothing behind."""
    box = target.box()
    yield box
    target.client.delete(box.url)


@pytest.fixture
def fresh(target: Target) -> Iterator[Box]:
    """A small session of the case's own."""
    box = target.box(**SMALL)
    yield box
    target.client.delete(box.url)


@pytest.fixture
def boxes(target: Target) -> Iterator[Callable[..., Box]]:
    """Sessions as the case wants them."""
    made: list[Box] = []

    def make(**request: Any) -> Box:
        made.append(target.box(**request))
        return made[-1]

    yield make
    for box in made:
        target.client.delete(box.url)
