"""
The code of a job, and the tokens that it writes.

Each run appends lines to a file in its workspace: job and execution, a number of its own, a kind
(`begin`, `tick`, `end`) and the time of the monotonic clock, which is the same inside and outside.
So the order and number of runs are known without a request.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from tests.e2e.chaos.plan import Finish, Job, Style

FILE = "tokens"
EXIT_CODE = 3

_TOKENS = """
import os, sys, time
nonce = time.monotonic_ns()
def token(word):
    name = os.environ["ATOLL_EXECUTION_ID"]
    line = "{job} %s %d %s %d\\n" % (name, nonce, word, time.monotonic_ns())
    fd = os.open("/workspace/{file}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, line.encode())
    os.close(fd)
    if {witness}:
        import socket
        with socket.create_connection({witness}) as connection:
            connection.sendall(line.encode())
            connection.recv(1)
"""
_BODY = """
token("begin")
print(nonce, flush=True)
for step in range({steps}):
    time.sleep({pause})
    print("step", step, flush=True)
    token("tick")
"""
_FINISH = {
    Finish.RETURN: 'token("end")\n',
    Finish.RAISE: 'token("end")\nraise ValueError("as planned")\n',
    Finish.EXIT: f'token("end")\nsys.exit({EXIT_CODE})\n',
    Finish.HANG: 'while True:\n    time.sleep(0.1)\n    token("tick")\n',
}


def of(job: Job, witness: tuple[str, int] | None = None) -> str:
    """`witness` is where it sends its tokens, too (`tests.e2e.chaos.witness`)."""
    setting = _TOKENS.format(job=job.number, file=FILE, witness=witness)
    body = _BODY.format(steps=job.steps, pause=job.pause) + _FINISH[job.finish]
    if job.style is Style.SCRIPT:
        return setting + body
    return setting + "def handler(event):\n" + textwrap.indent(body + "return [nonce]", "    ")


@dataclass
class Run:
    """One run of a job, by its own tokens."""

    job: int
    execution_id: str
    nonce: int
    tokens: list[tuple[str, int]] = field(default_factory=list)
    """Words and times in nanoseconds."""

    @property
    def began(self) -> int:
        return self.tokens[0][1]

    @property
    def last(self) -> int:
        """When it certainly still ran."""
        return self.tokens[-1][1]

    @property
    def ended(self) -> bool:
        return self.tokens[-1][0] == "end"

    def stdout(self, job: Job) -> str:
        """The complete output of a finished run."""
        return f"{self.nonce}\n" + "".join(f"step {step}\n" for step in range(job.steps))


def runs(content: str) -> list[Run]:
    """What ran, in the order in which it began."""
    found: dict[tuple[str, int], Run] = {}
    for line in content.splitlines():
        job, execution_id, nonce, word, at = line.split()
        key = (execution_id, int(nonce))
        run = found.setdefault(key, Run(int(job), execution_id, int(nonce)))
        run.tokens.append((word, int(at)))
    return sorted(found.values(), key=lambda run: run.began)
