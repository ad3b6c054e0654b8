"""
Runs the same programs as an ordinary user.

Started by root, a command gets an unused uid and a mount namespace in which that uid can reach the
required files: the interpreter, which may be in a closed home directory, and this checkout. A
closed directory on the path is covered, for this command only, by an empty one with bind mounts of
the required files. Started by an ordinary user, the command is unchanged.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.harness import Server
from tests.missing import missing

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = os.geteuid() == 0
UID = 64_123 if ROOT else os.geteuid()
CHECKOUT = Path(__file__).resolve().parents[1]

# Arguments: closed directories, a `--`, directories to bind back, a `--`, the command. Paths may
# contain spaces: only a newline separates two.
_SCRIPT = """
IFS='
'
set -f
closed= ; kept=
while [ "$1" != -- ]; do closed="$closed$1$IFS"; shift; done; shift
while [ "$1" != -- ]; do kept="$kept$1$IFS"; shift; done; shift
stage=/mnt; number=0
mount -t tmpfs tmpfs $stage
for path in $kept; do
    number=$((number + 1)); mkdir $stage/$number; mount --rbind "$path" $stage/$number
done
for path in $closed; do mount -t tmpfs -o mode=0755 tmpfs "$path"; done
number=0
for path in $kept; do
    number=$((number + 1)); mkdir -p "$path"; mount --move $stage/$number "$path"
done
umount $stage
cd "$PWD"
exec setpriv --reuid %(uid)d --regid %(uid)d --clear-groups --no-new-privs "$@"
"""


def _closed_above(path: Path) -> Path | None:
    """The topmost directory above `path` that others may not enter."""
    for directory in reversed(path.parents):
        if not directory.stat().st_mode & 0o001:
            return directory
    return None


def prefix() -> tuple[str, ...]:
    """What to put before a command for it to run unprivileged."""
    if not ROOT:
        return ()
    needed = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), CHECKOUT}
    kept = {path for path in needed if _closed_above(path) is not None}
    closed = {str(_closed_above(path)) for path in kept}
    kept = {path for path in kept if not any(other in path.parents for other in kept)}
    return (
        "unshare", "--mount", "--propagation", "private", "sh", "-eu", "-c", _SCRIPT % {"uid": UID},
        "sh", *sorted(closed), "--", *sorted(map(str, kept)), "--",
    )  # fmt: skip


@contextmanager
def directory() -> Iterator[Path]:
    """A temporary directory of that user's own, where it can reach it."""
    path = Path(tempfile.mkdtemp(prefix="atoll-unprivileged-"))
    try:
        if ROOT:
            os.chown(path, UID, UID)
        yield path
    finally:
        # A program: what hostile code left may be deeper than Python can go.
        subprocess.run(["chmod", "-R", "u+rwX", str(path)], check=False, capture_output=True)
        subprocess.run(["rm", "-rf", "--one-file-system", str(path)], check=True)


def environment(home: Path) -> dict[str, str]:
    """The environment of that user: of the developer's it has only the path of programs."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(home),
        "PYTHONPATH": str(CHECKOUT / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run(*arguments: str, home: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments as that user."""
    return subprocess.run(
        [*prefix(), sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(home),
        cwd="/",
        check=False,
    )


class UnprivilegedServer(Server):
    """
    Only with the local driver: access to a Docker engine is equivalent to root. For a user whose
    systemd could provide control groups, it requests none: the tests need a server without.
    """

    prefix = prefix()

    def __init__(self, data_dir: Path, *arguments: str, **env: str) -> None:
        weak = {"ATOLL_DRIVER": "local", "ATOLL_LOCAL__DELEGATION": "false"}
        super().__init__(data_dir, *arguments, **{**weak, **env})


def require() -> None:
    """Skip the test where nothing can be run unprivileged."""
    for program in ("unshare", "setpriv") if ROOT else ():
        if shutil.which(program) is None:
            missing(f"{program} is not installed (package util-linux)")
