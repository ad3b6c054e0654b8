"""What the machine itself costs: the same work without Atoll."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from pathlib import Path

from bench.measure import Samples, timed

CODE = "print(1)"


def posix_spawn() -> Samples:
    def work() -> None:
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)

    return timed("posix_spawn /bin/true", work, count=500)


def python_under_bubblewrap() -> Samples:
    """A new interpreter under bubblewrap with control group limits, for each execution."""
    groups = _groups()
    join = "".join(f"echo $$ > {group}/cgroup.procs; " for group in groups)
    bubblewrap = [
        "bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev",
        "--tmpfs", "/tmp", os.path.realpath(sys.executable), "-c", CODE,
    ]  # fmt: skip
    command = ["/bin/sh", "-c", f'{join}exec "$@"', "sh", *bubblewrap]

    def work() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    words = f"python under bwrap, {len(groups)} control groups"
    try:
        return timed(words, work, count=40)
    finally:
        for group in groups:
            with contextlib.suppress(OSError):
                group.rmdir()


def _groups() -> list[Path]:
    root, name = Path("/sys/fs/cgroup"), f"atoll-bench-{secrets.token_hex(4)}"
    tops = [root / kind for kind in ("memory", "cpu", "pids")]
    if not all((top / "cgroup.procs").exists() for top in tops):
        tops = [root]
    made = []
    for top in tops:
        if os.access(top, os.W_OK):
            (top / name).mkdir()
            made.append(top / name)
    for group in made:
        for file, value in (
            ("memory.limit_in_bytes", 512 << 20),
            ("memory.max", 512 << 20),
            ("cpu.cfs_quota_us", 100_000),
            ("pids.max", 128),
        ):
            if (group / file).exists():
                (group / file).write_text(str(value))
    return made
