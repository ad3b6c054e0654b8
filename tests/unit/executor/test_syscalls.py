"""Whether a signal was sent from outside the namespace."""

from __future__ import annotations

import struct

import pytest

from atoll.executor import syscalls

KILL, QUEUED, THREAD, KERNEL = 0, -1, -6, 0x80


@pytest.mark.parametrize(
    ("code", "pid", "outside"),
    [
        pytest.param(KILL, 0, True, id="kill of another namespace"),
        pytest.param(KILL, 7, False, id="kill of a process inside"),
        pytest.param(QUEUED, 0, False, id="sigqueue with a forged sender"),
        pytest.param(-60, 0, False, id="sigqueue with any code"),
        pytest.param(THREAD, 0, False, id="tgkill"),
        pytest.param(KERNEL, 0, False, id="the kernel"),
    ],
)
def test_a_signal_counts_as_sent_from_the_host_only_if_it_cannot_be_forged(
    code: int, pid: int, outside: bool
) -> None:
    message = struct.pack("=IiiI", 15, 0, code, pid).ljust(128, b"\0")
    assert syscalls.is_from_outside(message) is outside
