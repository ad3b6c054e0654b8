"""An executor that no control plane is connected to any more."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from atoll.link.errors import LinkLost
from atoll.settings import LinkSettings
from tests.component.executor.test_interaction import Output
from tests.executors import executor, job
from tests.runs import run_over

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio

HOSTILE = """
import os, signal
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
if os.fork() == 0:
    os.setsid()
print("busy", flush=True)
while True: pass
"""
HOUR = 3600.0


def limits(grace: float, limit: float) -> LinkSettings:
    return LinkSettings(
        unattended_grace=timedelta(seconds=grace), unattended_limit=timedelta(seconds=limit)
    )


async def test_an_executor_that_was_never_connected_exits(bubblewrap: str, tmp_path: Path) -> None:
    with executor(bubblewrap, tmp_path, unattended=0.2) as started:
        assert await started.exit_code() == 0


@pytest.mark.parametrize(
    ("ends_in", "grace", "limit"),
    [
        pytest.param(0.1, 0.1, HOUR, id="after the session's end and the grace"),
        pytest.param(HOUR, HOUR, 0.2, id="at the limit, however long the session lasts"),
    ],
)
async def test_an_executor_exits_after_its_last_link(
    bubblewrap: str, tmp_path: Path, ends_in: float, grace: float, limit: float
) -> None:
    with executor(bubblewrap, tmp_path, unattended=HOUR) as started:
        link = await started.connect(limits(grace, limit))
        link.announce_end(ends_in)
        assert await link.call("sync") == {}
        link.close()
        assert await started.exit_code() == 0
    await started.disconnect()


async def test_busy_user_code_that_ignores_signals_ends_with_the_executor(
    bubblewrap: str, tmp_path: Path
) -> None:
    with executor(bubblewrap, tmp_path, unattended=HOUR) as started:
        link = await started.connect(limits(0.1, 0.1))
        await link.call("release", zygote=link.hello["zygote"])
        link.announce_end(0)
        output = Output()
        run = asyncio.create_task(run_over(link, job("one", HOSTILE), output))
        await output.until(b"busy")
        link.close()
        with pytest.raises(LinkLost):
            await run
        assert await started.exit_code() == 0
    await started.disconnect()
