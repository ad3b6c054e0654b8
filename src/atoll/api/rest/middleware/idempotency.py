"""
Requests that are done once: a POST with the header `Idempotency-Key`.

The first request with a key claims it in the store, on behalf of this replica, and its answer is
recorded before the client sees it. The same request again is given that answer, from whichever
replica; another one with the same key is refused. A key belongs to the API key that it came with.

A claim whose replica died is taken over, and the work is done again from the same seed: what it
creates has the ids that it had the first time, so nothing is doubled. The seed differs from one
claim of a key to the next: what is asked anew, after a refusal or after the time for which answers
are kept, is made anew.

Not kept are answers that say when to come back, and those of a request whose body never came whole:
the key is then free. Where a back-end went away in the middle, nobody knows whether the work was
done, and an answer may be too large to keep, or a stream of events: then the claim stays, held by
nobody, for the next who asks to take over. While the store cannot be reached, an answer to work
that was done is sent all the same, and recorded when the store is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog
from starlette.responses import Response

from atoll.api.rest.middleware.buffering import MAX_HELD, BufferedResponse, HashedRequestBody
from atoll.api.rest.problems import SIGNED, problem
from atoll.blobs.base import Oversized
from atoll.errors import AtollError, InvalidRequest, PermanentError, TemporaryError, TooLarge
from atoll.ids import Seed
from atoll.model.keyed import KeyedRequest

if TYPE_CHECKING:
    from datetime import timedelta

    from starlette.types import ASGIApp, Receive, Scope, Send

    from atoll.blobs.base import Blobs
    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

HEADER = b"idempotency-key"
REPLAYED = "Idempotency-Replayed"
PREFIX = "/api/"
"""Beyond it nobody had to show who they are, and may not make us write."""
INLINE = 32 * 1024
"""Bytes of an answer that are kept in its row; a larger one is in the blob store."""
NOBODY = ""
RECORD_SECONDS = 60.0
"""How long an answer that cannot be recorded is kept here; then the next who asks makes it anew."""
RECORD_PAUSES = (0.2, 2.0)
"""The first and the longest pause, in seconds, while an answer cannot be recorded."""

_NAMED = re.compile(r"-([0-9a-f]{64})$")
_VALUE = re.compile(rb"[!-~]{1,255}")
_COME_BACK = frozenset({429, 503})
_UNCERTAIN = frozenset(
    {
        "blobs_unavailable",
        "coordination_unavailable",
        "database_unavailable",
        "lease_lost",
        "node_not_reached",
        "spool_full",
    }
)
# Of this one sending, not of the answer.
_NOT_KEPT = frozenset({"connection", "content-length", "date", "set-cookie", "transfer-encoding"})


class Idempotency:
    """Belongs inside authentication, which says whose key it is, and the limit of bodies."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        store: Store,
        blobs: Blobs,
        coordination: Coordination,
        clock: Clock,
        ttl: timedelta,
    ) -> None:
        self._app = app
        self._store = store
        self._blobs = blobs
        self._coordination = coordination
        self._clock = clock
        self._ttl = ttl
        self._present: Counter[str] = Counter()
        """How many requests are here, by id."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == HEADER]
        path: str = scope["path"]
        # Who comes by a signed link is a stranger, for whom nothing is stored.
        if not given or not path.startswith(PREFIX) or path.startswith(SIGNED):
            await self._app(scope, receive, send)
            return
        if len(given) > 1 or _VALUE.fullmatch(given[0]) is None:
            await problem(_bad_key())(scope, receive, send)
            return
        owner: str = scope.get("atoll.key", "embedded")
        request_id = hashlib.sha256(f"{owner}\n".encode() + given[0]).hexdigest()
        # Before the first await: others that come now must see that this one is not forsaken.
        self._present[request_id] += 1
        try:
            await self._serve(
                request_id, HashedRequestBody(scope, receive, given[0]), scope, receive, send
            )
        finally:
            self._present[request_id] -= 1
            if not self._present[request_id]:
                del self._present[request_id]

    async def _serve(
        self, request_id: str, body: HashedRequestBody, scope: Scope, receive: Receive, send: Send
    ) -> None:
        await body.begin()
        if body.gone:
            return
        now = self._clock.now()
        claim = KeyedRequest(
            id=request_id,
            holder=self._coordination.replica,
            created_at=now,
            expires_at=now + self._ttl,
            fingerprint=body.fingerprint,
        )
        try:
            found = await self._store.requests.claim(claim)
            if found is not None and found.status is not None:
                await (await self._first_answer(found, found.status, body))(scope, receive, send)
                return
            if found is not None:
                claim = await self._take_over(found, body)
        except AtollError as error:
            await problem(error)(scope, receive, send)
            return
        scope["atoll.seed"] = _seed(claim)
        await self._run(claim, scope, body, send)

    async def _first_answer(
        self, found: KeyedRequest, status: int, body: HashedRequestBody
    ) -> Response:
        await body.drain()
        if body.fingerprint != found.fingerprint:
            raise _reused()
        content: bytes | None = found.body
        if found.kept is not None:
            content = await self._stored(found.kept)
        if content is None:
            raise PermanentError(
                "The answer to this request was kept, and is lost. The request was done.",
                code="answer_lost",
            )
        return Response(content, status, {**found.headers, REPLAYED: "true"})

    async def _stored(self, key: str) -> bytes | None:
        """An answer in the blob store; null when it is gone, or is not what was put there."""
        try:
            content = await self._blobs.get(key, limit=MAX_HELD)
        except Oversized:
            return None
        named = _NAMED.search(key)
        # Those of an earlier Atoll are not named by their content.
        if content is None or named is None or await _digest(content) == named[1]:
            return content
        return None

    async def _take_over(self, found: KeyedRequest, body: HashedRequestBody) -> KeyedRequest:
        """The claim of one that was not answered, as ours, unless somebody works on it."""
        if body.whole and found.fingerprint not in (None, body.fingerprint):
            raise _reused()
        me = self._coordination.replica
        if found.holder == me:
            busy = self._present[found.id] > 1
        else:
            busy = found.holder != NOBODY and await self._coordination.alive(found.holder)
        # What is known of the request now counts for those who come with another.
        found = replace(found, fingerprint=found.fingerprint or body.fingerprint)
        # Ours too is taken over: it may have been answered since it was found.
        if busy or not await self._store.requests.take_over(found, me):
            raise TemporaryError(
                "The first request with this Idempotency-Key is still being worked on.",
                code="idempotency_in_flight",
            )
        log.info("request.taken_over", request_id=found.id, holder=found.holder)
        return replace(found, holder=me)

    async def _run(
        self, claim: KeyedRequest, scope: Scope, body: HashedRequestBody, send: Send
    ) -> None:
        answer = BufferedResponse(send, lambda: self._let_go(claim, body))
        failure: Exception | None = None
        try:
            await self._app(scope, body.receive, answer.send)
        except Exception as error:  # noqa: BLE001 - raised again when its answer is recorded
            failure = error
        with contextlib.suppress(TooLarge):
            await body.drain()
        try:
            await self._settle(claim, body, answer)
        except TemporaryError:
            # It was done: the client is told so, though a crash right now would forget it.
            await answer.deliver()
            await self._settle_late(claim, body, answer)
        await answer.deliver()
        if failure is not None:
            raise failure

    async def _settle(
        self, claim: KeyedRequest, body: HashedRequestBody, answer: BufferedResponse
    ) -> None:
        requests = self._store.requests
        if not body.whole:
            await requests.forget(claim.id, claim.holder)
        elif not answer.whole or _code(answer) in _UNCERTAIN:
            await requests.take_over(claim, NOBODY)
        elif answer.status in _COME_BACK or "retry-after" in answer.headers:
            await requests.forget(claim.id, claim.holder)
        else:
            await self._keep(claim, body, answer)

    async def _let_go(self, claim: KeyedRequest, body: HashedRequestBody) -> None:
        """
        An event stream begins, so what it tells of is there under its seeded id: who comes with the
        same key, because the line broke perhaps, need not wait for the end of this one.
        """
        with contextlib.suppress(TemporaryError):  # At its end, then.
            known = replace(claim, fingerprint=claim.fingerprint or body.fingerprint)
            await self._store.requests.take_over(known, NOBODY)

    async def _settle_late(
        self, claim: KeyedRequest, body: HashedRequestBody, answer: BufferedResponse
    ) -> None:
        """Part of the request still, though its client has gone: a shutdown waits for it."""
        pause, longest = RECORD_PAUSES
        deadline = self._clock.monotonic() + RECORD_SECONDS
        while self._clock.now() < claim.expires_at:
            await asyncio.sleep(pause)
            pause = min(pause * 2, longest)
            try:
                if self._clock.monotonic() < deadline:
                    await self._settle(claim, body, answer)
                else:
                    answer.body.clear()
                    await self._store.requests.take_over(claim, NOBODY)
            except TemporaryError as error:
                log.warning("request.not_recorded", request_id=claim.id, error=error.message)
            else:
                return

    async def _keep(
        self, claim: KeyedRequest, body: HashedRequestBody, answer: BufferedResponse
    ) -> None:
        content, kept = bytes(answer.body), None
        if len(content) > INLINE:
            # A replica that was given up and comes back must not write over another one's.
            kept = f"requests/{_seed(claim).digest}/{claim.holder}-{await _digest(content)}"
            await self._blobs.put(kept, content)
        headers = {name: text for name, text in answer.headers.items() if name not in _NOT_KEPT}
        await self._store.requests.answer(
            replace(
                claim,
                fingerprint=body.fingerprint,
                status=answer.status,
                headers=headers,
                body=content if kept is None else b"",
                kept=kept,
            )
        )


async def _digest(content: bytes) -> str:
    return (await asyncio.to_thread(hashlib.sha256, content)).hexdigest()


def _seed(claim: KeyedRequest) -> Seed:
    text = f"{claim.id} {claim.created_at.isoformat()}"
    return Seed(hashlib.sha256(text.encode()).hexdigest(), claim.created_at)


def _code(answer: BufferedResponse) -> str | None:
    """The code of a refusal that passes by itself."""
    if answer.status not in _COME_BACK:
        return None
    try:
        found = json.loads(bytes(answer.body))
    except ValueError:
        return None
    return found.get("code") if isinstance(found, dict) else None


def _bad_key() -> InvalidRequest:
    return InvalidRequest(
        "Idempotency-Key: 1 to 255 visible ASCII characters, once.", code="bad_idempotency_key"
    )


def _reused() -> InvalidRequest:
    return InvalidRequest(
        "This Idempotency-Key was used for another request. Take a new key for a new request.",
        code="idempotency_key_reused",
    )
