"""Jobs between the supervisor and the zygote's children."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from atoll.executor.interpreter import jobs

Pair = tuple[Any, Any]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.settimeout(5)
    with ours, theirs:
        yield ours, theirs


def test_a_job_is_reported_as_taken_or_not_run(pair: Pair) -> None:
    ours, theirs = pair
    for number in (1, 2):
        jobs.send(ours, number, {}, [])
    assert jobs.receive_and_announce(theirs)[0] == 1
    assert jobs.recall(ours) == [(1, os.getpid())]
    # A spare that comes now gets the job but no further: it ends before any of it is run.
    with pytest.raises(BrokenPipeError):
        jobs.receive_and_announce(theirs)
    assert jobs.taken(ours) == []


def test_the_descriptors_of_a_job_are_not_inherited(pair: Pair) -> None:
    ours, theirs = pair
    sent = os.pipe()
    jobs.send(ours, 1, {"a": 1}, list(sent))
    _, job, received = jobs.receive_and_announce(theirs)
    assert job == {"a": 1}
    assert [os.get_inheritable(fd) for fd in received] == [False, False]
    for fd in (*sent, *received):
        os.close(fd)


def test_an_invalid_message_of_a_spare_child_is_ignored(pair: Pair) -> None:
    ours, theirs = pair
    theirs.send(b"nonsense")
    theirs.send(jobs.TAKEN.pack(1, 2))
    assert jobs.taken(ours) == [(1, 2)]
