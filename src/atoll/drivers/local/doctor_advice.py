"""Explains what an ordinary user lacks on this machine, and how to get it. Pure text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.drivers.local import cgroup_delegation, host_checks
from atoll.drivers.local.cgroup_delegation import Decision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.drivers.shared.checks import Check

WATCHED = {
    "control group: memory": "memory",
    "socket buffers": "socket buffers",
    "workspace quota": "disk",
}
MEANINGS = {
    "host uids": "sandboxes run with your uid, so only the namespaces protect your files",
    "control group: cpu": "CPU time is not limited",
    "control group: pids": "processes are limited by RLIMIT_NPROC only",
    "Debian packages": "templates cannot have Debian packages",
    "bucket mounts": "buckets cannot be mounted",
}
GROUPS = frozenset({
    "control group: memory", "control group: cpu", "control group: pids", "socket buffers",
})  # fmt: skip


def without_root(
    checks: Sequence[Check], decision: Decision, problem: str | None
) -> tuple[str, list[tuple[str, str]]]:
    """
    A paragraph, and the ways to get what is missing: a name with a sentence each. Both are empty
    where an ordinary user lacks nothing.

    `problem` is why the user's systemd cannot be asked, None if it can be.
    """
    missing = [check.name for check in checks if check.unprivileged and not check.ok]
    if not missing:
        return "", []
    paragraph = (
        f"Atoll does not run as root here, so {len(missing)} of these are weaker or missing. Every "
        "sandbox still has its own namespaces, no capabilities and no network. But "
        f"{'; '.join(_meanings(missing))}. A template that requires more is refused. "
        "Ways to get the rest:"
    )
    ways = [("root", "sudo atoll serve (all of the above)")]
    if GROUPS & set(missing):
        ways.append(("systemd", _systemd(decision, problem)))
    ways.append(("Docker", "ATOLL_DRIVER=docker atoll serve (the engine enforces the limits)"))
    return paragraph, ways


def _meanings(missing: Sequence[str]) -> list[str]:
    watched = [text for name, text in WATCHED.items() if name in missing]
    found = [MEANINGS[name] for name in missing if name in MEANINGS]
    if watched:
        limits = "their limits" if len(watched) > 1 else "its limit"
        verb = "are" if len(watched) > 1 else "is"
        found.append(
            f"{_listed(watched)} {verb} checked every 100 ms and can exceed {limits} in between"
        )
    return found


def _systemd(decision: Decision, problem: str | None) -> str:
    gives = "control groups for memory, CPU and processes, by delegation of cgroup v2"
    match decision:
        case Decision.VERSION_ONE:
            return f"{gives}; not on this machine, which has cgroup v1"
        case Decision.SERVICE:
            return f"{gives}; {cgroup_delegation.SERVICE_FIX}"
        case Decision.ASK if problem is None:
            return f"{gives}; atoll serve asks for it when it starts, or: {host_checks.DELEGATING}"
        case Decision.ASK:
            return f"{gives}; atoll serve cannot ask for it ({problem})"
        case _:
            # Delegated already: systemd has no other controllers to give.
            return f"{gives}; the missing controllers are not delegated to users of this machine"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
