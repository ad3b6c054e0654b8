"""Files of control groups: how they are read and written while a group may disappear."""

from __future__ import annotations

import contextlib
import errno
import time
from typing import TYPE_CHECKING

from atoll.drivers.shared.cgroups.base import GroupBusy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

GONE = (errno.ENOENT, errno.ENODEV)
"""Errors of a group that does not exist, or was removed after its file was opened."""


def write(path: Path, value: str | int) -> None:
    path.write_text(str(value))


@contextlib.contextmanager
def ignore_gone() -> Iterator[None]:
    """Ignore errors of a group that does not exist any more."""
    try:
        yield
    except OSError as error:
        if error.errno not in GONE:
            raise


def remove_group(path: Path) -> None:
    try:
        path.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        raise GroupBusy(path) from None


def remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def read_pids(group: Path) -> list[int]:
    try:
        return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    except OSError as error:
        if error.errno not in GONE:
            raise
        return []


def read_value(path: str) -> bytes:
    """The value in a file; empty if it does not exist."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(256).strip()
    except OSError:
        return b""


def read_counter(path: str, name: bytes) -> int:
    """A value by its name; 0 if the file does not exist."""
    # Called for every execution, so without pathlib and decoding.
    try:
        with open(path, "rb", buffering=0) as file:
            for line in file.read(4096).split(b"\n"):
                key, _, value = line.partition(b" ")
                if key == name:
                    return int(value)
    except OSError as error:
        if error.errno not in GONE:
            raise
    return 0


def read_size(path: str) -> int | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return int(file.read(64))
    except OSError as error:
        if error.errno not in GONE:
            raise
        return None


def wait_until(reached: Callable[[], bool | None], seconds: float) -> bool:
    """Wait until `reached()` is true; False after `seconds`, or once it returns None."""
    deadline = time.monotonic() + seconds
    pause = 0.0002
    while not (found := reached()):
        if found is None or time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.02)
    return True
