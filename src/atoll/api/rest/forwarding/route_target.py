"""
What a request is about, as its method and path tell: a session, an execution, an invocation, a
signed link, or a session that is to be made. What the database alone can answer for is about
nothing: it is answered where it comes to.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from atoll.api.rest.problems import SIGNED

PREFIX = "/api/v1/"
READING = frozenset({"GET", "HEAD"})
_RECORDS = frozenset({"", "executions", "artifacts", "secrets", "checkpoint", "dependencies"})
"""What is beneath a session and is read from the database."""
_FIXED = frozenset({"DELETE ", "PATCH ", "POST stop", "POST archive", "POST pause"})
"""What does not need a session to run."""


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
    needs_it: bool = False
    """Whether the session has to run for it."""
    falls_back: bool = False
    """Whether any node does what can be done when the session's does not answer."""


def target_of_request(method: str, path: str) -> RouteTarget | None:
    if not path.startswith(PREFIX):
        return None
    reading = method in READING
    if path.startswith(SIGNED):
        return RouteTarget(
            TargetKind.SIGNED, path[len(SIGNED) :], needs_it=True, falls_back=reading
        )
    room, _, rest = path[len(PREFIX) :].partition("/")
    name, _, what = rest.partition("/")
    if not name:
        return _COLLECTIONS.get(path) if method == "POST" else None
    if room == "sessions":
        if reading and what in _RECORDS:
            return None
        if method == "POST" and what == "clone":
            return RouteTarget(TargetKind.CLONE, name)
        needs_it = f"{method} {what}" not in _FIXED
        # The end of a session is a word in the database; its node acts on it when it can.
        return RouteTarget(
            TargetKind.SESSION, name, needs_it, reading or (method == "DELETE" and not what)
        )
    if room == "executions":
        return RouteTarget(TargetKind.EXECUTION, name, falls_back=reading)
    if room == "invocations":
        if reading and what == "executions":
            return None
        return RouteTarget(TargetKind.INVOCATION, name, falls_back=reading)
    return None


_COLLECTIONS = {
    f"{PREFIX}sessions": RouteTarget(TargetKind.CREATE),
    f"{PREFIX}invocations": RouteTarget(TargetKind.INVOKE, needs_it=True),
}
