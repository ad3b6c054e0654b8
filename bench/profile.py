"""
`make bench-profile`: where the CPU time of an execution goes.

Per execution of `print(1)`, for each process that takes part: CPU time, context switches and page
faults from /proc, and in runs of their own the system calls (strace) and the context switches of
the children (perf), if these programs are installed. The child lives for one execution; what it
used is what its zygote's ended children have used.

With `--beside`, the servers of two checkouts run at once and take turns, so that what else the
machine does falls on both. CPU time depends less on other load than latency does, but caches are
shared: compare figures of one run.
"""

from __future__ import annotations

import asyncio
import collections
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench import processes
from bench.__main__ import create, run, wait_for_pool
from bench.client import AsyncClient
from bench.measure import Samples, samples
from bench.processes import Usage
from bench.report import Report, parser
from bench.server import Server

if TYPE_CHECKING:
    import argparse

HERE = Path(__file__).parent.parent
MAIN, OTHERS, SUPERVISOR, ZYGOTE, CHILD, REST = (
    "server, main thread", "server, other threads", "supervisor", "zygote", "child",
    "spawner and the like",
)  # fmt: skip
OWN = str(Path(sys.executable).resolve())
BLOCKS = 10
"""How often the checkouts take turns."""
TRACED = 50
"""Executions whose system calls are counted."""
CALL = re.compile(r"(\d+) +(\w+)\(")
FORKS = 300
FLOORS = """
import json, os, resource, sys, time

count = int(sys.argv[1])

def floor(start):
    def used():
        mine, theirs = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        cpu = [(each.ru_utime + each.ru_stime) * 1000 for each in (mine, theirs)]
        return [*cpu, mine.ru_minflt, theirs.ru_minflt]
    times = []
    for number in range(count + 20):
        if number == 20:
            before = used()
        begin = time.perf_counter()
        os.waitpid(start(), 0)
        times.append((time.perf_counter() - begin) * 1000)
    return [sorted(times[20:])[count // 2]] + [(b - a) / count for a, b in zip(before, used())]

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return pid

def fork_and_print():
    pid = os.fork()
    if pid == 0:
        os.dup2(null, 1)
        exec(compile("print(1)", "<code>", "exec"), {})
        sys.stdout.flush()
        os._exit(0)
    return pid

null = os.open("/dev/null", os.O_WRONLY)
print(json.dumps({
    "posix_spawn /bin/true": floor(lambda: os.posix_spawn("/bin/true", ["true"], {})),
    "fork, _exit": floor(fork),
    "fork, compile, print, _exit": floor(fork_and_print),
}))
"""


def arguments() -> argparse.Namespace:
    options = parser("profile", __doc__)
    options.add_argument("--checkout", type=Path, default=HERE, help="checkout to measure")
    options.add_argument("--beside", type=Path, help="another checkout, to compare with")
    options.add_argument("--sessions", type=int, default=1, help="sessions that execute at once")
    options.add_argument("--executions", type=int, default=1000, help="of each checkout")
    options.add_argument("--code", default="print(1)")
    options.add_argument("--no-trace", action="store_true", help="do not count system calls")
    return options.parse_args()


@dataclass
class Subject:
    """One checkout's server, with its sessions and what they have used."""

    name: str
    server: Server
    sessions: list[str]
    code: str
    used: dict[str, Usage] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    calls: dict[str, collections.Counter[str]] = field(default_factory=dict)
    traced: int = 0

    @classmethod
    def start(cls, stack: ExitStack, checkout: Path, given: argparse.Namespace) -> Subject:
        program = str(checkout.absolute() / ".venv/bin/atoll")
        server = stack.enter_context(
            Server(program, ATOLL_POOL__SIZE="1", ATOLL_POOL__MAX_SIZE="1")
        )
        client = server.client()
        sessions = [create(client) for _ in range(given.sessions)]
        for session in sessions:
            for _ in range(20):
                run(client, session, given.code)
        wait_for_pool(client, "python", 1)
        return cls(checkout.absolute().name, server, sessions, given.code)

    def measure(self, count: int) -> None:
        """Execute so often in each session, all sessions at once."""
        before, begin = self._usage(), time.perf_counter()
        self.latencies += asyncio.run(self._execute(count))
        self.seconds += time.perf_counter() - begin
        for role, usage in self._usage().items():
            self.used[role] = self.used.get(role, Usage()) + usage - before.get(role, Usage())

    async def _execute(self, count: int) -> list[float]:
        """Milliseconds of each."""
        latencies = []

        async def one(session: str) -> None:
            client = await AsyncClient.connect(self.server.host, self.server.port)
            path = f"/api/v1/sessions/{session}/execute"
            body = {"code": self.code, "wait": 30}
            request = self.server.client().prepare("POST", path, body)
            for _ in range(count):
                start = time.perf_counter()
                if await client.send(request) != 200:
                    raise RuntimeError("an execution failed")
                latencies.append((time.perf_counter() - start) * 1000)
            client.close()

        await asyncio.gather(*(one(session) for session in self.sessions))
        return latencies

    def _instances(self) -> list[tuple[int, int]]:
        """Supervisor and zygote of each instance that runs."""
        paths = self.server.data_dir.glob("node/instances/*/handle.json")
        supervisors = [json.loads(path.read_text())["data"]["child"] for path in paths]
        return [
            (supervisor, pid)
            for supervisor in supervisors
            for pid in processes.children(supervisor)
            if processes.name(pid) == "zygote"
        ]

    def _usage(self) -> dict[str, Usage]:
        server = self.server.process.pid
        used = {
            MAIN: processes.of_thread(server, server),
            OTHERS: processes.of_process(server) - processes.of_thread(server, server),
        }
        mine = set()
        for role in (SUPERVISOR, ZYGOTE, CHILD, REST):
            used[role] = Usage()
        for supervisor, zygote in self._instances():
            mine |= set(processes.tree(supervisor))
            used[SUPERVISOR] += processes.of_process(supervisor)
            used[ZYGOTE] += processes.of_process(zygote)
            used[CHILD] += processes.of_ended_children(zygote)
        for pid in set(processes.tree(server)) - mine - {server}:
            used[REST] += processes.of_process(pid)
        return used

    def trace(self, count: int) -> None:
        """Count the system calls of so many executions in each session."""
        server = self.server.process.pid
        instances = self._instances()
        pids = [server, *(pid for found in instances for pid in processes.tree(found[0]))]
        roles = dict.fromkeys(processes.threads(server), OTHERS) | {server: MAIN}
        for supervisor, zygote in instances:
            roles |= {supervisor: SUPERVISOR, zygote: ZYGOTE}
        with tempfile.NamedTemporaryFile() as log:
            attach = [option for pid in pids for option in ("-p", str(pid))]
            strace = subprocess.Popen(
                ["strace", "-f", "-o", log.name, *attach], stderr=subprocess.PIPE, text=True
            )
            assert strace.stderr is not None
            for _ in pids:
                strace.stderr.readline()  # "Process … attached"
            asyncio.run(self._execute(count))
            strace.terminate()
            strace.communicate()
            for line in Path(log.name).read_text(errors="replace").splitlines():
                if found := CALL.match(line):
                    role = roles.get(int(found[1]), CHILD)
                    self.calls.setdefault(role, collections.Counter())[found[2]] += 1
        self.traced += count * len(self.sessions)

    def count_switches(self, count: int) -> None:
        """Let perf count context switches of the children, which leave no trace in /proc."""
        zygotes = [zygote for _, zygote in self._instances()]
        pids = ",".join(str(pid) for zygote in zygotes for pid in processes.tree(zygote))
        before = sum((processes.of_process(pid) for pid in zygotes), Usage())
        perf = subprocess.Popen(
            ["perf", "stat", "-x,", "-e", "context-switches", "-p", pids],
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(0.3)
        asyncio.run(self._execute(count))
        after = sum((processes.of_process(pid) for pid in zygotes), Usage())
        perf.send_signal(signal.SIGINT)
        counted = float(perf.communicate()[1].split(",")[0])
        switches = counted - (after - before).switches
        # In proportion to the executions that `used` is about.
        done = len(self.latencies) / (count * len(self.sessions))
        self.used[CHILD] += Usage(switches=switches * done)

    @property
    def samples(self) -> Samples:
        return samples(f"{self.name}: execute", self.latencies)


def show(report: Report, subject: Subject) -> None:
    count = len(subject.latencies)
    report.section(f"{subject.name}: {len(subject.sessions)} sessions at once")
    report.add(subject.samples)
    report.value("executions", count / subject.seconds, "/s")
    print(f"{'per execution':<26}{'CPU ms':>9}{'switches':>10}{'faults':>9}{'syscalls':>10}")
    total = Usage()
    for role, used in subject.used.items():
        each = used / count
        if not each.cpu:
            continue
        total += each
        calls = sum(subject.calls.get(role, {}).values()) / (subject.traced or 1)
        _line(report, role, each, calls)
    calls = sum(found.total() for found in subject.calls.values()) / (subject.traced or 1)
    _line(report, "together", total, calls)
    for role, names in subject.calls.items():
        most = (f"{name} {times / subject.traced:.3g}" for name, times in names.most_common(14))
        print(f"  {role}: {', '.join(most)}")


def _line(report: Report, role: str, each: Usage, calls: float) -> None:
    print(f"{role:<26}{each.cpu:9.3f}{each.switches:10.2f}{each.faults:9.1f}{calls:10.1f}")
    report.record(f"{role}: CPU", "ms", each.cpu)
    report.record(f"{role}: context switches", "", each.switches)
    report.record(f"{role}: page faults", "", each.faults)
    if calls:
        report.record(f"{role}: system calls", "", calls)


def compare(one: Subject, other: Subject) -> None:
    print(f"\n{one.name} / {other.name}")
    print(f"{'latency, p50':<26}{one.samples.p50 / other.samples.p50:9.2f}")
    print(f"{'executions a second':<26}{other.seconds / one.seconds:9.2f}")
    for role, used in one.used.items():
        if beside := other.used[role].cpu:
            print(f"{'CPU: ' + role:<26}{used.cpu / beside:9.2f}")


def floors(report: Report) -> None:
    report.section("floors")
    print(f"{'':<42}{'p50 ms':>9}{'CPU, parent':>13}{'child':>8}{'faults':>8}{'child':>8}")
    for interpreter in dict.fromkeys((OWN, "/usr/bin/python3")):
        if Path(interpreter).exists():
            done = subprocess.run(
                [interpreter, "-I", "-S", "-c", FLOORS, str(FORKS)],
                stdout=subprocess.PIPE,
                check=True,
            )
            print(interpreter)
            for name, (p50, *cpu, faults, of_child) in json.loads(done.stdout).items():
                print(
                    f"  {name:<40}{p50:9.3f}{cpu[0]:13.3f}{cpu[1]:8.3f}{faults:8.1f}{of_child:8.1f}"
                )
                kind = "own interpreter" if interpreter == OWN else "the system's interpreter"
                report.record(f"{name}, {kind}", "ms", p50, n=FORKS, ours=False)


def main() -> None:
    given = arguments()
    checkouts = [given.checkout] if given.beside is None else [given.checkout, given.beside]
    with Report("profile", given.json, given.checkout) as report:
        floors(report)
        with ExitStack() as stack:
            subjects = [Subject.start(stack, checkout, given) for checkout in checkouts]
            each = max(1, given.executions // BLOCKS // given.sessions)
            for _ in range(BLOCKS):
                for subject in subjects:
                    subject.measure(each)
            for subject in subjects:
                if not given.no_trace and shutil.which("strace"):
                    subject.trace(max(1, TRACED // given.sessions))
                if not given.no_trace and shutil.which("perf"):
                    subject.count_switches(each)
        for subject in subjects:
            show(report, subject)
        if given.beside is not None:
            compare(*subjects)


if __name__ == "__main__":
    main()
