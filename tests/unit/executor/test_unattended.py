"""How long an executor waits for a control plane."""

from __future__ import annotations

from typing import Any, cast

import pytest

from atoll.executor.event_loop import Timer
from atoll.executor.unattended import Unattended

MINUTE, HOUR = 60.0, 3600.0


class Time:
    """A loop whose clock the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[Timer] = []
        self.left = 0

    def after(self, seconds: float, call: Any) -> Timer:
        timer = Timer(self.now + seconds, call)
        self.timers.append(timer)
        return timer

    def leave(self) -> None:
        self.left += 1

    def pass_by(self, seconds: float) -> None:
        """Awake all the time: each timer is called when it is due."""
        end = self.now + seconds
        while due := [timer for timer in self.timers if timer.call and timer.due <= end]:
            first = min(due, key=lambda timer: timer.due)
            self.now = max(self.now, first.due)
            self._call(first)
        self.now = end

    def freeze(self, seconds: float) -> None:
        """No timer fires in between; due ones fire afterwards."""
        self.now += seconds
        for timer in self.timers:
            if timer.call and timer.due <= self.now:
                self._call(timer)

    @staticmethod
    def _call(timer: Timer) -> None:
        call, timer.call = timer.call, None
        assert call is not None
        call()


class Silent:
    """A request that nothing answers."""

    number = 1

    def __init__(self) -> None:
        self.connection = self

    def close_stream(self, number: int) -> None: ...


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def unattended(time: Time) -> Unattended:
    return Unattended(cast("Any", time), 10 * MINUTE, time.leave, lambda: time.now)


def configure_session(unattended: Unattended, *, ends_in: float) -> None:
    request = {"ends_in": ends_in, "grace": 10 * MINUTE, "limit": 6 * HOUR}
    unattended.configure(cast("Any", Silent()), request)


def test_without_a_session_the_grace_period_applies(time: Time, unattended: Unattended) -> None:
    unattended.disconnected()
    time.pass_by(10 * MINUTE - 1)
    assert time.left == 0
    time.pass_by(1)
    assert time.left == 1


@pytest.mark.parametrize(
    ("ends_in", "waits"),
    [
        pytest.param(5 * MINUTE, 15 * MINUTE, id="the session's end and the grace"),
        pytest.param(-5 * MINUTE, 10 * MINUTE, id="the grace, of one that has ended"),
        pytest.param(24 * HOUR, 6 * HOUR, id="never longer than the limit"),
    ],
)
def test_the_wait_depends_on_the_remaining_life_of_the_session(
    time: Time, unattended: Unattended, ends_in: float, waits: float
) -> None:
    configure_session(unattended, ends_in=ends_in)
    unattended.disconnected()
    time.pass_by(waits - 1)
    assert time.left == 0
    time.pass_by(1)
    assert time.left == 1


def test_a_link_ends_the_wait_and_the_next_loss_starts_another(
    time: Time, unattended: Unattended
) -> None:
    unattended.disconnected()
    time.pass_by(9 * MINUTE)
    unattended.connected()
    time.pass_by(24 * HOUR)
    unattended.disconnected()
    time.pass_by(9 * MINUTE)
    assert time.left == 0
    time.pass_by(MINUTE)
    assert time.left == 1


def test_time_while_the_instance_was_frozen_does_not_count(
    time: Time, unattended: Unattended
) -> None:
    unattended.disconnected()
    time.pass_by(4 * MINUTE)
    time.freeze(24 * HOUR)  # Counts as two minutes at most.
    time.pass_by(3 * MINUTE)
    assert time.left == 0
    time.pass_by(2 * MINUTE)
    assert time.left == 1
