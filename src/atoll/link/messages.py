"""
The messages of an executor, converted to types with checked values.

There is a function for each kind of message. A missing field, a wrong type or a value beyond a
limit is a `ProtocolViolation`; unknown fields are dropped, so that nothing unchecked goes further.
docs/reference/executor-protocol.md describes the messages.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from atoll.link import validation as check
from atoll.link.errors import ExecutorError, ProtocolViolation, refusal
from atoll.model.file_times import MAX_NANOSECONDS
from atoll.model.manifest import parse_entry
from atoll.protocol import frames

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.link.output import Intake

MAX_RUNS = 10_000
MAX_FEATURES = 64
MAX_PID = 2**22
MAX_ENTRIES = 10_000
"""Entries of one page of a list."""
MAX_ARTIFACTS = 10_000
MAX_SECONDS = 10 * 366 * 86_400.0
MAX_MOMENT = 2.0**36
"""Seconds since 1970; later years are beyond Python's calendar."""
MAX_SIGNAL = 64
MAX_NOTICE = 256 * 1024
MAX_QUESTION = 64 * 1024
SHORT_EVENT = 1024
"""Bytes of an event without content."""
TYPES = ("file", "directory", "symlink", "other")
REASONS = (None, "timeout", "cancelled", "memory", "disk", "shutdown")
STATES = ("idle", "busy", "dead")
CHANGES = ("asked", "answered", "refused")


class JournalEntry(TypedDict):
    id: str
    ended: bool


class Hello(TypedDict):
    version: int
    features: list[str]
    python: str
    zygote: int
    runs: list[JournalEntry]


class FileEntry(TypedDict):
    path: str
    type: str
    size: int
    mode: int
    modified: int
    etag: str | None
    start: NotRequired[int | None]
    stop: NotRequired[int]


class ArtifactEntry(TypedDict):
    path: str
    size: int
    modified: int
    sha256: str | None


class Usage(TypedDict):
    cpu: float
    peak: int
    read: int
    written: int


class RunResult(TypedDict):
    exit_code: int | None
    signal: int | None
    reason: str | None
    duration: float
    began: float
    usage: Usage
    sizes: dict[str, int]
    error: dict[str, str] | None
    artifacts: list[ArtifactEntry]
    artifacts_cut: bool
    entries: int
    """Number of the last entry in the run's log."""


def hello(raw: dict[str, Any]) -> Hello:
    runs = check.items(raw.get("runs"), "list of runs", MAX_RUNS)
    features = check.items(raw.get("features", []), "list of features", MAX_FEATURES)
    return {
        "version": check.integer(
            raw.get("version"), "version", least=frames.VERSION, most=frames.VERSION
        ),
        "features": [check.text(item, "feature", check.MAX_NAME) for item in features],
        "python": check.text(raw.get("python", ""), "Python version", check.MAX_NAME),
        "zygote": check.integer(raw.get("zygote"), "pid", most=MAX_PID),
        "runs": [_journal_entry(check.fields(item, "run")) for item in runs],
    }


def _journal_entry(item: dict[str, Any]) -> JournalEntry:
    return {
        "id": check.text(item.get("id"), "id", check.MAX_NAME),
        "ended": check.flag(item.get("ended"), "run"),
    }


def zygote(raw: dict[str, Any]) -> int | None:
    """The pid of a new zygote; None for an unknown event."""
    if raw.get("event") != "zygote":
        return None
    return check.integer(raw.get("pid"), "pid", least=1, most=MAX_PID)


def refused(operation: str, raw: dict[str, Any]) -> ExecutorError:
    message = check.shortened(raw.get("message"), "message")
    return refusal(operation, check.code(raw.get("code")), message)


# Runs


def result(raw: dict[str, Any], intake: Intake | None) -> RunResult:
    """The result of a run; sizes and artifacts are limited by `intake`."""
    exit_code, signal, error = raw.get("exit_code"), raw.get("signal"), raw.get("error")
    reason = raw.get("reason")
    if exit_code is None and signal is None:
        raise check.wrong("result: neither an exit code nor a signal")
    if reason not in REASONS:
        raise check.wrong("reason")
    artifacts, cut = _artifacts(raw, intake)
    return {
        "exit_code": None if exit_code is None else check.integer(exit_code, "exit code", most=255),
        "signal": None
        if signal is None
        else check.integer(signal, "signal", least=1, most=MAX_SIGNAL),
        "reason": reason,
        "duration": check.number(raw.get("duration"), "duration", MAX_SECONDS),
        "began": check.number(raw.get("began", 0.0), "start", MAX_MOMENT),
        "usage": _usage(check.fields(raw.get("usage", {}), "usage")),
        "sizes": _sizes(check.fields(raw.get("sizes", {}), "sizes"), intake),
        "error": None if error is None else _problem(check.fields(error, "error")),
        "artifacts": artifacts,
        "artifacts_cut": cut,
        "entries": check.integer(raw.get("entries", 0), "number of entries"),
    }


def _usage(raw: dict[str, Any]) -> Usage:
    peak, read, written = (
        int(check.number(raw.get(name, 0), name, check.LARGEST))
        for name in ("peak", "read", "written")
    )
    cpu = check.number(raw.get("cpu", 0.0), "processor time", MAX_SECONDS)
    return {"cpu": cpu, "peak": peak, "read": read, "written": written}


def _sizes(raw: dict[str, Any], intake: Intake | None) -> dict[str, int]:
    sizes = {}
    for channel in (frames.STDOUT, frames.STDERR, frames.VALUE):
        if str(channel) in raw:
            claimed = check.integer(raw[str(channel)], "size")
            sizes[str(channel)] = claimed if intake is None else intake.size(channel, claimed)
    return sizes


def _problem(raw: dict[str, Any]) -> dict[str, str]:
    message = check.shortened(raw.get("message"), "message")
    return {"code": check.code(raw.get("code")), "message": message}


def _artifacts(raw: dict[str, Any], intake: Intake | None) -> tuple[list[ArtifactEntry], bool]:
    listed = check.items(raw.get("artifacts", []), "list of artifacts", MAX_ARTIFACTS)
    cut = check.flag(raw.get("artifacts_cut", False), "list of artifacts")
    if intake is not None and len(listed) > intake.limits.artifacts:
        if intake.requested:
            raise check.wrong("list of artifacts: it is too long")
        listed, cut = listed[: intake.limits.artifacts], True
    return [_artifact(check.fields(item, "artifact")) for item in listed], cut


def _artifact(raw: dict[str, Any]) -> ArtifactEntry:
    digest = raw.get("sha256")
    return {
        "path": check.path(raw.get("path")),
        "size": check.integer(raw.get("size"), "size"),
        "modified": _nanoseconds(raw.get("modified")),
        "sha256": None if digest is None else check.text(digest, "digest", 64),
    }


def _nanoseconds(value: object) -> int:
    return check.integer(value, "time", least=-MAX_NANOSECONDS, most=MAX_NANOSECONDS)


def approval(raw: dict[str, Any]) -> dict[str, Any] | None:
    """A question of a run, or its outcome; None for anything else."""
    try:
        return _approval(raw)
    except ProtocolViolation:
        return None


def _approval(raw: dict[str, Any]) -> dict[str, Any]:
    state = raw.get("state")
    if state not in CHANGES:
        raise check.wrong("state")
    checked: dict[str, Any] = {"id": check.text(raw.get("id"), "id", 32), "state": state}
    if state == "asked":
        question = check.text(raw.get("question"), "question", MAX_QUESTION)
        timeout = check.number(raw.get("timeout"), "timeout", MAX_SECONDS)
        return {**checked, "question": question, "data": raw.get("data"), "timeout": timeout}
    reason = raw.get("reason")
    return {
        **checked,
        "approved": check.flag(raw.get("approved"), "answer"),
        "answer": raw.get("answer"),
        "reason": None if reason is None else check.text(reason, "reason", MAX_QUESTION),
    }


# Files


def entry(raw: object) -> FileEntry:
    item = check.fields(raw, "entry")
    kind, etag = item.get("type"), item.get("etag")
    if kind not in TYPES:
        raise check.wrong("type of a file")
    return {
        "path": check.path(item.get("path")),
        "type": kind,
        "size": check.integer(item.get("size"), "size"),
        "mode": check.integer(item.get("mode"), "mode", most=0xFFFF),
        "modified": _nanoseconds(item.get("modified")),
        "etag": None if etag is None else check.text(etag, "etag", check.MAX_NAME),
    }


def _read(raw: dict[str, Any]) -> dict[str, Any]:
    """The file that is about to be sent, and the range of its bytes."""
    found = entry(raw.get("entry"))
    size = found["size"]
    start, stop = raw["entry"].get("start", 0), raw["entry"].get("stop", size)
    found["stop"] = check.integer(stop, "range", most=size)
    found["start"] = None if start is None else check.integer(start, "range", most=found["stop"])
    return {"event": "entry", "entry": found}


def _word(raw: dict[str, Any]) -> dict[str, Any]:
    return {"event": check.code(raw.get("event"))}


def _collected(raw: dict[str, Any]) -> dict[str, Any]:
    """An event of a file transfer: start, hole, end, or that the file is gone."""
    name = raw.get("event")
    if name == "hole":
        return {"event": name, "length": check.integer(raw.get("length"), "hole")}
    index = check.integer(raw.get("index"), "index", most=MAX_ENTRIES)
    if name == "gone":
        return {"event": name, "index": index}
    if name == "over":
        return {"event": name, "index": index, "same": check.flag(raw.get("same"), "event")}
    if name == "file":
        return {"event": name, "index": index, "entry": scanned(raw.get("entry"))}
    raise check.wrong("event")


def scanned(fields: object) -> list[Any]:
    """An entry of a scan, which `model.manifest` parses."""
    try:
        if isinstance(fields, list):
            parse_entry(fields)
            return fields
    except (ValueError, TypeError, OverflowError):
        pass
    raise check.wrong("entry")


def notice(line: bytes) -> dict[str, Any]:
    """A change of a watched file."""
    try:
        raw = check.fields(json.loads(line), "notice")
    except (ValueError, RecursionError):
        raise check.wrong("notice") from None
    checked = {"type": check.code(raw.get("type")), "path": check.path(raw.get("path"))}
    if raw.get("from") is not None:
        checked["from"] = check.path(raw["from"])
    return checked


def _entry_alone(raw: dict[str, Any]) -> dict[str, Any]:
    return {"entry": entry(raw.get("entry"))}


def _page(raw: dict[str, Any]) -> dict[str, Any]:
    entries = check.items(raw.get("entries"), "list of files", MAX_ENTRIES)
    following = raw.get("next")
    return {
        "entries": [entry(item) for item in entries],
        "next": None if following is None else check.path(following),
    }


def _matches(raw: dict[str, Any]) -> dict[str, Any]:
    found = check.items(raw.get("matches"), "list of matches", MAX_ENTRIES)
    following = raw.get("next")
    if following is not None:
        position = check.fields(following, "place")
        following = {
            "path": check.path(position.get("path")),
            "line": check.integer(position.get("line"), "line"),
        }
    return {"matches": [_match(check.fields(item, "match")) for item in found], "next": following}


def _match(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        "path": check.path(raw.get("path")),
        "line": check.integer(raw.get("line"), "line"),
        "column": check.integer(raw.get("column"), "column"),
        "text": check.text(raw.get("text"), "text"),
    }


# Contexts and processes


def _context(raw: object) -> dict[str, Any]:
    item = check.fields(raw, "context")
    if item.get("state") not in STATES:
        raise check.wrong("state")
    return {
        "id": check.text(item.get("id"), "id", check.MAX_NAME),
        "language": check.text(item.get("language"), "language", check.MAX_NAME),
        "cwd": check.path(item.get("cwd")),
        "state": item["state"],
        "created": check.number(item.get("created"), "time", MAX_MOMENT),
        "execution_count": check.integer(item.get("execution_count"), "count"),
    }


def _contexts(raw: dict[str, Any]) -> dict[str, Any]:
    listed = check.items(raw.get("contexts"), "list of contexts", MAX_ENTRIES)
    return {"contexts": [_context(item) for item in listed]}


def _process(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        "pid": check.integer(raw.get("pid"), "pid", least=1, most=MAX_PID),
        "execution_id": check.text(raw.get("execution_id"), "id", check.MAX_NAME),
        "name": check.text(raw.get("name"), "name", check.MAX_NAME),
    }


def _processes(raw: dict[str, Any]) -> dict[str, Any]:
    listed = check.items(raw.get("processes"), "list of processes", MAX_ENTRIES)
    return {"processes": [_process(check.fields(item, "process")) for item in listed]}


def _released(raw: dict[str, Any]) -> dict[str, Any]:
    failed = check.fields(raw.get("preload_failed"), "list of modules")
    return {
        "preload_failed": {
            check.text(name, "module"): check.shortened(why, "message")
            for name, why in failed.items()
        }
    }


def _counted(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def counted(raw: dict[str, Any]) -> dict[str, Any]:
        return {name: check.integer(raw.get(name, 0), name)}

    return counted


def _scan_end(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: check.flag(raw.get(name, False), "scan") for name in ("cut", "frozen")}


_ANSWERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    **dict.fromkeys(("write", "stat", "mkdir", "move", "chmod", "copy"), _entry_alone),
    **dict.fromkeys(("list", "tree"), _page),
    **dict.fromkeys(
        ("context_create", "context_restart", "context_interrupt"),
        lambda raw: {"context": _context(raw.get("context"))},
    ),
    "search": _matches,
    "unpack": _counted("entries"),
    "populate": _counted("made"),
    "memory_limit": _counted("bytes"),
    "context_list": _contexts,
    "processes": _processes,
    "release": _released,
    "scan": _scan_end,
}
_EVENTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "read": _read,
    "pack": _word,
    "follow": _word,
    "collect": _collected,
}


def answer(op: str, raw: dict[str, Any]) -> dict[str, Any]:
    """The END of a request; empty for requests without a result."""
    checked = _ANSWERS.get(op)
    return {} if checked is None else checked(raw)


def event(op: str, raw: dict[str, Any]) -> dict[str, Any]:
    """An EVENT of a request that may send events."""
    checked = _EVENTS.get(op)
    if checked is None:
        raise check.wrong(f"event for {op}")
    return checked(raw)
