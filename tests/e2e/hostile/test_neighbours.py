"""What the kernel counts by user: a session that takes all of it takes nothing of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.e2e.hostile.host import eventually

if TYPE_CHECKING:
    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box

pytestmark = [pytest.mark.every_driver, pytest.mark.quick]

TAKE = """
import ctypes, fcntl, os, time
libc = ctypes.CDLL(None, use_errno=True)
F_SETPIPE_SZ = 1031

def watches():
    return libc.inotify_init1(0) >= 0

def timers():
    return libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0

def queues():
    made = libc.mq_open(b'/queue', os.O_CREAT | os.O_RDWR, 0o600, None)
    libc.mq_unlink(b'/queue')
    return made >= 0

def pipes():
    read, write = os.pipe()
    try:
        return fcntl.fcntl(write, F_SETPIPE_SZ, 1 << 20) == 1 << 20
    except OSError:
        return False

def taken(take, most):
    count = 0
    while count < most and take():
        count += 1
    return count
"""
MOST = {"watches": 900, "timers": 200_000, "queues": 250, "pipes": 400}


@pytest.mark.parametrize("kind", MOST)
def test_a_session_cannot_exhaust_per_user_kernel_limits_of_another(
    target: Target, boxes: Callable[..., Box], kind: str
) -> None:
    if not target.privileged:
        pytest.skip("promised where each workspace has a host uid of its own")
    greedy, other = boxes(max_processes=64), boxes()
    alone = int(other.printed(f"{TAKE}\nprint(taken({kind}, 16))"))
    execution = greedy.submit(
        f"{TAKE}\ntaken({kind}, {MOST[kind]})\nopen('done', 'w')\ntime.sleep(600)", timeout=600
    )
    eventually(
        lambda: greedy.client.get(f"{greedy.files}/done").status_code == 200, f"all {kind} taken"
    )
    assert int(other.printed(f"{TAKE}\nprint(taken({kind}, 16))")) == alone > 0
    greedy.client.post(f"/api/v1/executions/{execution}/cancel")
