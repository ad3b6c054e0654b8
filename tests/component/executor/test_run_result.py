"""The time between the exit of a run's process and its result."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from atoll.executor.callbacks import Callbacks
from atoll.executor.event_loop import Loop
from atoll.executor.files.outputs import Outputs
from atoll.executor.files.workspace import Workspace
from atoll.executor.interpreter.zygote_client import ZygoteClient
from atoll.executor.runs.journal import Journal
from atoll.executor.runs.process_table import ProcessTable
from atoll.executor.runs.run import NO_USAGE, Run
from atoll.executor.runs.runs import Runs
from tests.executors import job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_run_whose_process_has_exited_cannot_be_cancelled(tmp_path: Path) -> None:
    root, loop = tmp_path / "workspace", Loop()
    root.mkdir()
    later: list[Callable[[], None]] = []
    flags = os.O_RDWR | os.O_CREAT
    fds = [os.open(tmp_path / name, flags, 0o600) for name in ("journal.0", "journal.1")]
    journal = Journal(fds)

    class SlowOutputs(Outputs):
        """Has the files hashed, and reports that only later."""

        def _hash(self, files: list[dict[str, Any]], done: Callable[[], None]) -> None:
            later.append(done)

    class UnstartedZygote(ZygoteClient):
        def poll_taken(self) -> None:
            pass

    own_processes: set[int] = set()
    runs = Runs(
        loop,
        UnstartedZygote(loop, {}, own_processes),
        ProcessTable(loop, own_processes),
        SlowOutputs(loop, Workspace(str(root))),
        journal,
        Callbacks(loop, None, own_processes),
    )
    run = Run(job("one", "print(1)"), loop)
    run.parked = False
    (root / "made").write_text("by it")
    runs.conclude(run, 0, dict(NO_USAGE))
    assert run.result is None
    # The executor is asked to exit now: the finished run is not repeated.
    runs.end(run, "shutdown", 0.0)
    assert run.reason is None
    (finish,) = later
    finish()

    assert run.result is not None
    assert (run.result["reason"], run.result["exit_code"]) == (None, 0)
    assert [found[0] for found in Journal(fds).load()] == ["one"]
    for fd in fds:
        os.close(fd)
    loop.close()
