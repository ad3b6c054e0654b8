"""The host's view of pods: their processes, which run in nested PID namespaces of this machine."""

from __future__ import annotations

import re
from pathlib import Path

from tests.host_processes import living
from tests.servers.kubernetes.images import PAUSE_PROGRAM


def processes_of_pod(uid: str) -> set[int]:
    """The host's pids of the living processes of a pod, its pause container excluded."""
    return {pid for pid in living() if _belongs_to(pid, uid)}


def first_process(uid: str) -> int | None:
    """The host's pid of the process that is PID 1 in a pod's container."""
    return next((pid for pid in processes_of_pod(uid) if _innermost_pid(pid) == 1), None)


def _belongs_to(pid: int, uid: str) -> bool:
    groups = _read(pid, "cgroup")
    # Systemd's names of control groups have no hyphens.
    is_in_pod = f"pod{uid}" in groups or f"pod{uid.replace('-', '_')}" in groups
    return is_in_pod and _read(pid, "comm").strip() != PAUSE_PROGRAM


def _innermost_pid(pid: int) -> int | None:
    found = re.search(r"^NSpid:.*\s(\d+)$", _read(pid, "status"), re.MULTILINE)
    return None if found is None else int(found[1])


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
