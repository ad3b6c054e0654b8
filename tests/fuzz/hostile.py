"""Frames that a hostile executor sends: valid, nearly valid, and nonsense."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from atoll.protocol import frames

RESULT: dict[str, Any] = {
    "exit_code": 0, "signal": None, "reason": None, "duration": 0.001, "began": 1.7e9,
    "usage": {"cpu": 0.01, "peak": 1 << 20, "read": 0, "written": 0},
    "sizes": {"1": 2, "2": 0, "3": 0}, "error": None,
    "artifacts": [{"path": "a", "size": 1, "modified": 1, "sha256": None}],
    "artifacts_cut": False, "entries": 1,
}  # fmt: skip
ENTRY = {"path": "a", "type": "file", "size": 5, "mode": 0o644, "modified": 1, "etag": "x"}
CONTEXT = {
    "id": "ctx_1", "language": "python", "cwd": "/workspace", "state": "idle", "created": 1.7e9,
    "execution_count": 1,
}  # fmt: skip
SCANNED = ["a", "f", 0o644, 5, 1, 1, 1]
HELLO = {"version": 1, "features": ["run"], "python": "3.11", "zygote": 2, "runs": []}
ANSWERS: dict[str, dict[str, Any]] = {
    "run": RESULT,
    "attach": RESULT,
    "list": {"entries": [ENTRY], "next": "a"},
    "search": {
        "matches": [{"path": "a", "line": 1, "column": 1, "text": "x"}],
        "next": {"path": "a", "line": 1},
    },
    "stat": {"entry": ENTRY},
    "write": {"entry": ENTRY},
    "unpack": {"entries": 1},
    "memory_limit": {"bytes": 1},
    "processes": {"processes": [{"pid": 7, "execution_id": "exec_1", "name": "sleep"}]},
    "context_list": {"contexts": [CONTEXT]},
    "release": {"preload_failed": {"numpy": "no"}},
    "scan": {"cut": False, "frozen": True},
    "read": {"short": 0},
    "pack": {"skipped": 0},
    "follow": {},
    "collect": {},
}
EVENTS: dict[str, list[dict[str, Any]]] = {
    "run": [{"event": "started"}, {"event": "heartbeat"}],
    "attach": [{"event": "started"}],
    "read": [{"event": "entry", "entry": {**ENTRY, "start": 0, "stop": 5}}],
    "pack": [{"event": "packing"}],
    "follow": [{"event": "watching"}],
    "collect": [
        {"event": "file", "index": 0, "entry": SCANNED},
        {"event": "hole", "length": 5},
        {"event": "over", "index": 0, "same": True},
    ],
}
OWN = -1
"""The stream of the request that is answered."""


@dataclass(frozen=True)
class Said:
    """An encoded frame; `announced` is a wrong length."""

    stream: int
    kind: int
    payload: bytes
    announced: int | None = None

    def encoded(self, own: int) -> bytes:
        length = len(self.payload) if self.announced is None else self.announced
        stream = own if self.stream == OWN else self.stream
        return frames.HEADER.pack(length, stream, self.kind) + self.payload


def say(kind: int, value: Any, stream: int = OWN) -> Said:
    """As JSON, also where JSON has no such number."""
    return Said(stream, kind, json.dumps(value).encode("utf-8", "surrogatepass"))


def output(data: bytes, sequence: int = 1, channel: int = frames.STDOUT) -> Said:
    return Said(OWN, frames.OUTPUT, frames.OUTPUT_HEADER.pack(sequence, channel) + data)


scalars = (
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 255, 256, 2**31, 2**63, 2**64, 10**40, -(10**40)])
    | st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.5, 1e308, 1e-320])
    | st.text(st.characters(codec=None), max_size=12)
    | st.sampled_from(["", "\0", "\ud800", "\udc80", "../..", "x" * 20_000, "nan", "started"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A message in which something is not as it should be."""
    if isinstance(value, dict) and value:
        name = draw(st.sampled_from(sorted(value)))
        what = draw(st.integers(0, 9))
        if what == 0:
            return {key: item for key, item in value.items() if key != name}
        if what == 1:
            return {**value, draw(st.text(max_size=6)): draw(values)}
        return {**value, name: draw(changed(value[name]))}
    if isinstance(value, list) and value and draw(st.booleans()):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], draw(changed(value[place])), *value[place + 1 :]]
    if isinstance(value, list) and value and draw(st.booleans()):
        return value * draw(st.integers(0, 3000))
    return draw(values)


def _messages(op: str) -> st.SearchStrategy[Said]:
    ends = [(frames.END, ANSWERS[op])]
    events = [(frames.EVENT, event) for event in EVENTS.get(op, [])]
    errors = [(frames.ERROR, {"code": "file_not_found", "message": "a does not exist"})]
    return st.sampled_from(ends + events * 2 + errors).flatmap(
        lambda kind: st.one_of(st.just(kind[1]), changed(kind[1])).map(
            lambda value: say(kind[0], value)
        )
    )


def _bytes() -> st.SearchStrategy[Said]:
    sizes = st.sampled_from([0, 1, 5, 100, 65_536, 65_541, 200_000, 262_144])
    sequences = st.sampled_from([0, 1, 2, 3, 2**32 - 1])
    channels = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 255])
    lines = st.sampled_from([b"x", b'{"a":1}\n', b"V[1]", b"Vnan", b"\n", b"\xff"])
    pieces = st.tuples(lines, sizes).map(lambda made: made[0] * (made[1] // len(made[0]) + 1))
    return st.one_of(
        st.builds(output, pieces.map(lambda data: data[:70_000]), sequences, channels),
        pieces.map(lambda data: Said(OWN, frames.DATA, data)),
        st.binary(max_size=8).map(lambda data: Said(OWN, frames.OUTPUT, data)),
        st.binary(max_size=6).map(lambda data: Said(OWN, frames.CREDIT, data)),
    )


def _nonsense() -> st.SearchStrategy[Said]:
    streams = st.sampled_from([OWN, 0, 1, 2, 77, 2**32 - 1])
    payloads = st.sampled_from(
        [b"", b"{}", b"[]", b"{", b"null", b"[" * 10_000, b'{"event":"zygote","pid":1e999}']
    )
    lengths = st.none() | st.sampled_from([0, 1, 2**20 + 1, 2**25, 2**32 - 1])
    return st.builds(Said, streams, st.integers(0, 255), payloads | st.binary(max_size=40), lengths)


def scripts(op: str) -> st.SearchStrategy[list[Said]]:
    """Frames sent in response to one request."""
    frame = st.one_of(_messages(op), _messages(op), _bytes(), _nonsense())
    return st.lists(frame, min_size=1, max_size=12)


hellos = st.one_of(st.just(HELLO), changed(HELLO)).map(lambda made: say(frames.HELLO, made, 0))
