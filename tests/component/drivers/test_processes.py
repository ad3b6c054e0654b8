"""Processes of this machine, by pid and start time."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from atoll.drivers.shared import processes

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        yield process
        process.kill()


def started(process: subprocess.Popen[bytes]) -> int:
    found = processes.start_time(process.pid)
    assert found is not None
    return found


def test_wait_returns_false_for_a_running_process(sleeper: subprocess.Popen[bytes]) -> None:
    assert not processes.wait(sleeper.pid, started(sleeper), 0.001)


def test_the_end_of_a_process_is_detected_before_and_after_it_is_reaped(
    sleeper: subprocess.Popen[bytes],
) -> None:
    began = started(sleeper)
    sleeper.kill()
    assert processes.wait(sleeper.pid, began, 60)
    assert processes.start_time(sleeper.pid) is None
    sleeper.wait()
    assert processes.wait(sleeper.pid, began, 60)


def test_another_process_with_the_same_pid_is_not_waited_for(
    sleeper: subprocess.Popen[bytes],
) -> None:
    assert processes.wait(sleeper.pid, started(sleeper) - 1, 60)
    assert sleeper.poll() is None
