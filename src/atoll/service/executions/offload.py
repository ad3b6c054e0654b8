"""
What of an execution is too large for its row.

An execution has six parts that can be large: `request` (what it was given, as JSON), `stdout`,
`stderr`, `return_json`, `results_json` and `log` (as JSON too). One that is larger than the bound
goes to a blob; the row keeps the key, in `kept`, and of what was given and of output the beginning.

A key is made of the execution's id, the part's name, how much of it there is to show, and the
digest of its content. The same save repeated writes the same object again, two that race with
different results do not touch each other's, and what comes back is checked: a blob that is missing
or damaged is a part that is lost, and stays in `kept`.
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
"""Bytes that JSON makes of a piece of the log, about; more than that only of large ones."""
_ESCAPED = 12
"""Most bytes that JSON makes of one character."""
_ENVELOPE = 128
"""More bytes than JSON needs for the names of a request's fields."""
_encode = json.JSONEncoder(separators=(",", ":")).encode


MAX_FETCHES = 8
"""Executions whose parts are read at the same time: each takes the memory of all its parts."""

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

    async def put_away(self, execution: Execution) -> Execution:
        """
        The execution as it goes into the store. A part that `kept` names already is left alone; if
        all others are small this is the execution itself, and nothing is awaited.
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
        The execution with all its parts whole and out of `kept`. What is lost stays there, and its
        beginning stays in its place.
        """
        if not execution.kept:
            return execution
        async with self._fetches:
            found = {part: await self._part(key) for part, key in execution.kept.items()}
            whole = await asyncio.to_thread(_whole, execution, found)
        for part, key in whole.kept.items():
            log.error("execution.part_lost", execution_id=execution.id, part=part, blob=key)
        return whole

    async def _part(self, key: str) -> bytes | None:
        try:
            return await self._blobs.get(key)
        except OversizedBlob:
            return None  # Whatever is there, it is not the part.

    async def request_of(self, execution: Execution) -> Request:
        """
        The whole request, to be run; `PermanentError` with code `request_lost` if it cannot be had.
        """
        if REQUEST not in execution.kept:
            return execution.request
        only = replace(execution, kept={REQUEST: execution.kept[REQUEST]})
        whole = await self.fetch(only)
        if whole.kept:
            raise PermanentError(
                f"What execution {execution.id} was to run is no longer in the blob store. "
                "Submit it again.",
                code="request_lost",
            )
        return whole.request

    async def forget(self, execution: Execution) -> None:
        """Remove its blobs, those too that a save which never came to pass has left."""
        await self._blobs.remove_all(_prefix(execution))

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
            beginnings: dict[str, Any] = {
                "stdout": outcome.stdout[:head],
                "stderr": outcome.stderr[:head],
                "return_json": None,
                "results_json": None,
                LOG: None,
            }
            outcome = replace(
                outcome, **{part: beginnings[part] for part in keys if part in beginnings}
            )
        return replace(execution, request=request, outcome=outcome, kept=execution.kept | keys)


def size_of(outcome: Outcome) -> int:
    """Bytes of the parts that can be large."""
    parts = (outcome.stdout, outcome.stderr, outcome.return_json, outcome.results_json)
    return sum(len(part) for part in parts if part is not None)


def shortened(execution: Execution) -> list[str]:
    """The parts that are shown and of which only the beginning is in the execution."""
    return [
        part
        for part, key in execution.kept.items()
        if part != LOG and _shown(execution, part) < int(key.rsplit("-", 2)[1])
    ]


def _shown(execution: Execution, part: str) -> int:
    """How much of a part there is to show: bytes, of a request characters, of a log pieces."""
    if part == REQUEST:
        request = execution.request
        return len(request.code or "") + sum(map(len, request.command or ()))
    return len(getattr(execution.outcome, part, None) or b"")


def _first(words: tuple[str, ...], size: int) -> tuple[str, ...]:
    """As many of the words as fit into so many characters; the last one may be cut."""
    first = []
    for word in words:
        if size <= 0:
            break
        first.append(word[:size])
        size -= len(word) + 1
    return tuple(first)


def _fits(request: Request, limit: int) -> bool:
    """Whether the request's JSON is within the limit, without making it if that is clear."""
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
    """A length that the JSON of `value` has at least; no further look once it is `enough`."""
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


def _whole(execution: Execution, found: Mapping[str, bytes | None]) -> Execution:
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
