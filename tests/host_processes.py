"""The processes of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def processes() -> dict[int, tuple[int, str, str]]:
    """Parent, state and name of every process of the host, by pid."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path("/proc", entry, "stat").read_text(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            name = text[text.index("(") + 1 : text.rindex(")")]
            fields = text[text.rindex(")") + 2 :].split()
            found[int(entry)] = (int(fields[1]), fields[0], name)
    return found


def living() -> set[int]:
    """Pids of processes that have not ended."""
    return {pid for pid, (_, state, _) in processes().items() if state not in "ZX"}


def below(pid: int) -> set[int]:
    """Living processes below one."""
    every = processes()
    found: set[int] = set()
    stack = [pid]
    while stack:
        parent = stack.pop()
        children = {child for child, (above, _, _) in every.items() if above == parent} - found
        found |= children
        stack += children
    return {child for child in found if every[child][1] not in "ZX"}


def of_instances(pids: set[int]) -> set[int]:
    """Those of a spawner's processes that are of instances: not its fork server."""
    return {pid for pid in pids if not is_fork_server(pid)}


def is_fork_server(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        outside = os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except (FileNotFoundError, ProcessLookupError):
        return False
    # Instances that are its forks have the same command line.
    return b"fork_server" in command and outside
