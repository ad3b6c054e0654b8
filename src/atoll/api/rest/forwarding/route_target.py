"""
What a request concerns, by its method and path: a session, an execution, an invocation, a signed
link, or a session that is to be created. Requests that the database alone can serve concern none of
these and are served by the node that receives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from atoll.api.rest.problems import SIGNED

PREFIX = "/api/v1/"
SAFE_METHODS = frozenset({"GET", "HEAD"})
_RECORDS = frozenset({"", "executions", "artifacts", "secrets", "checkpoint", "dependencies"})
"""Resources below a session that are read from the database."""
_WORKS_WHILE_STOPPED = frozenset({"DELETE ", "PATCH ", "POST stop", "POST archive", "POST pause"})


class TargetKind(StrEnum):
    SESSION = "session"
    EXECUTION = "execution"
    INVOCATION = "invocation"
    SIGNED = "signed"
    CREATE = "create"
    CLONE = "clone"
    INVOKE = "invoke"


@dataclass(frozen=True, slots=True)
class RouteTarget:
    kind: TargetKind
    id: str = ""
    needs_instance: bool = False
    """Whether the session must run to serve it."""
    falls_back: bool = False
    """Whether any node can serve part of it while the session's node is unreachable."""


_COLLECTIONS = {
    f"{PREFIX}sessions": RouteTarget(TargetKind.CREATE),
    f"{PREFIX}invocations": RouteTarget(TargetKind.INVOKE, needs_instance=True),
}


def target_of_request(method: str, path: str) -> RouteTarget | None:
    if not path.startswith(PREFIX):
        return None
    reads = method in SAFE_METHODS
    if path.startswith(SIGNED):
        token = path[len(SIGNED) :]
        return RouteTarget(TargetKind.SIGNED, token, needs_instance=True, falls_back=reads)
    collection, _, rest = path[len(PREFIX) :].partition("/")
    name, _, below = rest.partition("/")
    if not name:
        return _COLLECTIONS.get(path) if method == "POST" else None
    if collection == "sessions":
        return _target_of_session(method, name, below)
    if collection == "executions":
        return RouteTarget(TargetKind.EXECUTION, name, falls_back=reads)
    if collection == "invocations" and not (reads and below == "executions"):
        return RouteTarget(TargetKind.INVOCATION, name, falls_back=reads)
    return None


def _target_of_session(method: str, session_id: str, below: str) -> RouteTarget | None:
    reads = method in SAFE_METHODS
    if reads and below in _RECORDS:
        return None
    if method == "POST" and below == "clone":
        return RouteTarget(TargetKind.CLONE, session_id)
    needs_instance = f"{method} {below}" not in _WORKS_WHILE_STOPPED
    # Deleting a session only writes to the database; its node acts on it when it can.
    falls_back = reads or (method == "DELETE" and not below)
    return RouteTarget(TargetKind.SESSION, session_id, needs_instance, falls_back)
