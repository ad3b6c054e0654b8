"""
Stores parts of an execution that are too large for its row as blobs.

Six parts can be large: `request` (as JSON), `stdout`, `stderr`, `return_json`, `results_json` and
`log` (as JSON). A part above the limit becomes a blob; the row keeps its key, in `kept`, and the
head of a request or of output.

A key contains the execution's id, the part's name, its displayed size and the digest of its
content. So a repeated write writes the same object, two writes that race do not touch each other's
objects, and damage is detected: a blob that is missing or damaged stays in `kept`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog

from atoll.blobs.base import OversizedBlob
from atoll.errors import PermanentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.blobs.base import Blobs
    from atoll.model.execution import Execution, Outcome, Request

log = structlog.get_logger(__name__)

REQUEST = "request"
LOG = "log"
_PIECE = 12
"""Bytes of JSON of an entry of the log, roughly; only large entries have more."""
_ESCAPED = 12
"""At most so many bytes of JSON for one character."""
_ENVELOPE = 128
"""More bytes than the names of a request's fields have in JSON."""
_encode = json.JSONEncoder(separators=(",", ":")).encode


MAX_FETCHES = 8
"""Executions whose parts are read at the same time: each needs memory for all its parts."""

INLINE_LIMIT = 32 * 1024
"""
Bytes of the largest request (as JSON), stdout, stderr, return value or results that is stored in
the database; a larger one is stored as a blob.
"""
HEAD_SIZE = 4096
"""How much of an offloaded part lists show: bytes of output, or characters of code."""


class Offload:
    def __init__(
        self, blobs: Blobs, *, inline_limit: int = INLINE_LIMIT, head: int = HEAD_SIZE
    ) -> None:
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        self._blobs = blobs
        self._limit = inline_limit
        self._head = head

    async def store(self, execution: Execution) -> Execution:
        """
        Store the large parts; returns the execution as its record has it. Parts that `kept` names
        already are skipped. If all others are small, this is the execution itself, and nothing is
        awaited.
        """
        large = self._large_parts(execution)
        if not large:
            return execution
        blobs = await asyncio.to_thread(_blobs_of, execution, large)
        for key, data in blobs.values():
            await self._blobs.put(key, data)
        keys = {part: key for part, (key, _) in blobs.items()}
        return self._shortened(execution, keys)

    async def fetch(self, execution: Execution) -> Execution:
        """
        The complete execution, with an empty `kept`. A part that is lost stays there, and its head
        in its place.
        """
        if not execution.kept:
            return execution
        async with self._fetches:
            found = {part: await self._part(key) for part, key in execution.kept.items()}
            complete = await asyncio.to_thread(_complete, execution, found)
        for part, key in complete.kept.items():
            log.error("execution.part_lost", execution_id=execution.id, part=part, blob=key)
        return complete

    async def _part(self, key: str) -> bytes | None:
        try:
            return await self._blobs.get(key)
        except OversizedBlob:
            return None  # Another object is in its place.

    async def request_of(self, execution: Execution) -> Request:
        """
        The complete request. Raises `PermanentError`, `request_lost`, if its blob is lost.
        """
        if REQUEST not in execution.kept:
            return execution.request
        only = replace(execution, kept={REQUEST: execution.kept[REQUEST]})
        complete = await self.fetch(only)
        if complete.kept:
            raise PermanentError(
                f"The blob store lost the request of execution {execution.id}. Submit it again.",
                code="request_lost",
            )
        return complete.request

    def _large_parts(self, execution: Execution) -> list[str]:
        kept, outcome, limit = execution.kept, execution.outcome, self._limit
        large = []
        if REQUEST not in kept and not _fits(execution.request, limit):
            large.append(REQUEST)
        if outcome is not None:
            if len(outcome.stdout) > limit and "stdout" not in kept:
                large.append("stdout")
            if len(outcome.stderr) > limit and "stderr" not in kept:
                large.append("stderr")
            value, results, pieces = outcome.return_json, outcome.results_json, outcome.log
            if value is not None and len(value) > limit and "return_json" not in kept:
                large.append("return_json")
            if results is not None and len(results) > limit and "results_json" not in kept:
                large.append("results_json")
            if pieces is not None and _PIECE * len(pieces) > limit and LOG not in kept:
                large.append(LOG)
        return large

    def _shortened(self, execution: Execution, keys: dict[str, str]) -> Execution:
        request, outcome, head = execution.request, execution.outcome, self._head
        if REQUEST in keys:
            request = replace(
                request,
                code=None if request.code is None else request.code[:head],
                command=None if request.command is None else _first(request.command, head),
                event=None,
                stdin=None,
                body=None,
                args=(),
                env={},
            )
        if outcome is not None:
            heads: dict[str, Any] = {
                "stdout": outcome.stdout[:head],
                "stderr": outcome.stderr[:head],
                "return_json": None,
                "results_json": None,
                LOG: None,
            }
            outcome = replace(outcome, **{part: heads[part] for part in keys if part in heads})
        return replace(execution, request=request, outcome=outcome, kept=execution.kept | keys)


def size_of(outcome: Outcome) -> int:
    """Bytes of the parts that can be large."""
    parts = (outcome.stdout, outcome.stderr, outcome.return_json, outcome.results_json)
    return sum(len(part) for part in parts if part is not None)


def shortened(execution: Execution) -> list[str]:
    """Displayed parts of which the execution has only the head."""
    return [
        part
        for part, key in execution.kept.items()
        if part != LOG and _shown(execution, part) < int(key.rsplit("-", 2)[1])
    ]


def _shown(execution: Execution, part: str) -> int:
    """Displayed size of a part: bytes; characters of a request, entries of a log."""
    if part == REQUEST:
        request = execution.request
        return len(request.code or "") + sum(map(len, request.command or ()))
    return len(getattr(execution.outcome, part, None) or b"")


def _first(words: tuple[str, ...], size: int) -> tuple[str, ...]:
    """As many words as fit into `size` characters; the last one may be cut."""
    first = []
    for word in words:
        if size <= 0:
            break
        first.append(word[:size])
        size -= len(word) + 1
    return tuple(first)


def _fits(request: Request, limit: int) -> bool:
    """Whether the request's JSON is within the limit; it is encoded only if in doubt."""
    size = len(request.code or "") + len(request.stdin or "") + len(request.body or "")
    items = 0
    for words in (request.command or (), request.args, request.env, request.env.values()):
        if words:
            items += len(words)
            size += sum(map(len, words))
    if not request.event and _ESCAPED * size + 4 * items + _ENVELOPE <= limit:
        return True
    if size + _least(request.event, limit) > limit:
        return False
    return len(_encode(_given(request))) <= limit


def _least(value: Any, enough: int) -> int:
    """A lower bound of the length of `value` as JSON; it stops counting at `enough`."""
    least, pending = 0, [[value]]
    while pending and least <= enough:
        items: Any = pending.pop()
        least += len(items)
        if least > enough:
            break
        if type(items) is dict:
            least += sum(map(len, items))
            items = items.values()
        for item in items:
            kind = type(item)
            if kind is str:
                least += len(item)
            elif kind is dict or kind is list:
                pending.append(item)
    return least


def _given(request: Request) -> dict[str, Any]:
    """The fields that can be large."""
    given = {
        "code": request.code,
        "command": request.command,
        "event": request.event,
        "stdin": request.stdin,
        "args": request.args,
        "env": request.env,
    }
    if request.body is not None:
        given["body"] = request.body
    return given


def _blobs_of(execution: Execution, parts: list[str]) -> dict[str, tuple[str, bytes]]:
    """Key and content of these parts."""
    blobs = {}
    for part in parts:
        if part == REQUEST:
            data = _encode(_given(execution.request)).encode()
        elif part == LOG:
            data = _encode(getattr(execution.outcome, LOG)).encode()
        else:
            data = getattr(execution.outcome, part)
        size = _shown(execution, part)
        blobs[part] = (f"{_prefix(execution)}{part}-{size}-{_digest(data)}", data)
    return blobs


def _complete(execution: Execution, found: Mapping[str, bytes | None]) -> Execution:
    request, outcome, lost = execution.request, execution.outcome, {}
    for part, key in execution.kept.items():
        data = found[part]
        if data is None or not key.endswith(f"-{_digest(data)}"):
            lost[part] = key
        elif part == REQUEST:
            request = _with(request, json.loads(data))
        elif outcome is not None:
            content = tuple(map(tuple, json.loads(data))) if part == LOG else data
            changed: dict[str, Any] = {part: content}
            outcome = replace(outcome, **changed)
    return replace(execution, request=request, outcome=outcome, kept=lost)


def _with(request: Request, given: dict[str, Any]) -> Request:
    if given["command"] is not None:
        given["command"] = tuple(given["command"])
    given["args"] = tuple(given["args"])
    return replace(request, **given)


def _prefix(execution: Execution) -> str:
    return f"executions/{execution.created_at:%Y%m%d}/{execution.id}/"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
