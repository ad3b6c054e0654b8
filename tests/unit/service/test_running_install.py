"""What an installation has printed."""

from __future__ import annotations

import pytest

from atoll.service.packages.running_install import LOG_LIMIT, RunningInstall


@pytest.mark.parametrize("piece", [1000, LOG_LIMIT, 3 * LOG_LIMIT])
def test_a_long_log_keeps_its_beginning_and_its_end(piece: int) -> None:
    running = RunningInstall()
    printed = b"first" + bytes(4 * LOG_LIMIT) + b"last"
    for place in range(0, len(printed), piece):
        running.add_output(printed[place : place + piece])

    text = running.text
    assert running.size == len(printed)
    assert text.startswith(b"first")
    assert text.endswith(b"last")
    assert f"... {len(printed) - LOG_LIMIT} bytes omitted ...".encode() in text
    assert len(text) < LOG_LIMIT + 100


def test_a_short_log_is_kept_and_passed_to_listeners() -> None:
    running = RunningInstall()
    received: list[bytes] = []
    running.listeners.append(received.append)
    running.add_output(b"printed\n")
    running.say("said")

    assert running.text == b"".join(received) == b"printed\natoll: said\n"
