"""
The processes of a cluster, all of them descendants of one reaper (`tests.servers.reaper`).

The reaper kills them, also when the tests are killed, and then removes the directory and the
control groups of the cluster.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.servers import reaper
from tests.standstill import stand_still

MAX_LOG = 6000
"""Characters of the log of a process that ended, in the error message."""
NICE = ("nice", "-n", "5")
"""The tests go first."""
_LOGGED = 'log=$1; shift; exec "$@" >>"$log" 2>&1'


class Process:
    """A program that was started; it need not run any more."""

    def __init__(self, name: str, pid: int, log: Path) -> None:
        self.name = name
        self.pid = pid
        self.log = log
        self._killed = False
        self._descriptor: int | None = None
        with suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(pid)

    @property
    def runs(self) -> bool:
        return self._descriptor is not None and not select.select([self._descriptor], [], [], 0)[0]

    @property
    def died(self) -> bool:
        """It ended, and no test killed it."""
        return not self._killed and not self.runs

    def kill(self) -> None:
        """Kill it and wait for its end. One that has ended is no error."""
        self._killed = True
        if self._descriptor is None:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        ended = select.select([self._descriptor], [], [], 60)[0]
        os.close(self._descriptor)
        self._descriptor = None
        assert ended, f"{self.name} did not end"

    def pause(self) -> None:
        """It stays connected but responds to nothing."""
        assert self.runs, f"{self.name} is not running"
        stand_still(self.pid)

    def resume(self) -> None:
        assert self._descriptor is not None, f"{self.name} is not running"
        signal.pidfd_send_signal(self._descriptor, signal.SIGCONT)

    def forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Processes:
    """Starts processes; `close` ends all of them."""

    def __init__(self, place: Path, cgroup: str, logs: Path) -> None:
        self._place = place
        self._cgroup = cgroup
        self.logs = logs
        self._lock = threading.Lock()
        self._started: dict[str, Process] = {}
        self._reaper = self._start_reaper()

    def start(self, name: str, *command: str) -> Process:
        log = self.logs / f"{name}.log"
        with self._lock:
            earlier = self._started.get(name)
            assert earlier is None or not earlier.runs, f"{name} is already running"
            if earlier is not None:
                earlier.forget()
            words = [*NICE, "sh", "-c", _LOGGED, "sh", str(log), *command]
            pid = int(self._tell(f"run {json.dumps(words)}"))
            self._started[name] = Process(name, pid, log)
            return self._started[name]

    def require_alive(self, others: Sequence[Path] = ()) -> None:
        """
        Fail when one has ended though no test killed it. `others` are the logs of programs that
        ended in the nodes.
        """
        with self._lock:
            died = [process.log for process in self._started.values() if process.died]
        ends = [f"{log.stem} ended: {log.read_text()[-MAX_LOG:]}" for log in (*died, *others)]
        assert not ends, "\n\n".join(ends)

    def close(self) -> None:
        for process in self._started.values():
            process.forget()
        with self._reaper as ended:
            assert ended.stdin is not None
            ended.stdin.close()
            code = ended.wait(60)
        assert code == 0, f"the cluster left something behind: {self._log.read_text()[-4000:]}"

    def report(self) -> str:
        """The last lines of each log."""
        ends = [f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(self.logs.glob("*.log"))]
        return "\n\n".join(ends)

    @property
    def _log(self) -> Path:
        return self.logs / "reaper.log"

    def _start_reaper(self) -> subprocess.Popen[str]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__, str(self._place), self._cgroup],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C in the terminal must reach only the tests, which then stop it.
                start_new_session=True,
            )

    def _tell(self, line: str) -> str:
        assert self._reaper.stdin is not None
        assert self._reaper.stdout is not None
        self._reaper.stdin.write(f"{line}\n")
        self._reaper.stdin.flush()
        answer = self._reaper.stdout.readline()
        assert answer, f"the reaper failed: {self._log.read_text()[-4000:]}"
        return answer
