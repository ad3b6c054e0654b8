"""
Serves a POST with the header `Idempotency-Key` once.

The first request with a key claims it in the store for this replica, and its response is recorded
before the client receives it. The same request again gets that response, from whichever replica; a
different request with the key is refused. Keys are separate for each API key.

Another replica takes over the claim of a lost one, and serves the request again with the same seed:
new objects get the same ids, so nothing is created twice. The seed differs from one claim of a key
to the next: a request that is repeated after a refusal, or after the record has expired, creates
new ids.

Responses that ask the client to retry later, and responses to incomplete requests, are not
recorded: their key is free again. If a back-end became unavailable in the middle, the request may
or may not have been served; and some responses are too large to record, or are event streams. Then
the claim stays without a holder, and the next request takes it over. While the store is
unavailable, the response is sent nevertheless, and recorded when the store is back.
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

from atoll.api.rest.middleware.buffering import MAX_BUFFERED, BufferedResponse, HashedRequestBody
from atoll.api.rest.problems import RETRYABLE, SIGNED, problem
from atoll.blobs.base import OversizedBlob
from atoll.errors import (
    AtollError,
    BlobsUnavailable,
    CoordinationUnavailable,
    DatabaseUnavailable,
    InvalidRequest,
    LeaseLost,
    NodeUnreachable,
    PermanentError,
    SpoolFull,
    TemporaryError,
    TooLarge,
)
from atoll.ids import Seed
from atoll.model.keyed_request import KeyedRequest

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
"""Other paths need no API key, and their callers may not cause writes."""
INLINE = 32 * 1024
"""Bytes of a response that are stored in its row; a larger one is stored in the blob store."""
NO_HOLDER = ""
RECORD_TIMEOUT = 60.0
"""Seconds to keep a response that cannot be recorded; afterwards a repeated request runs again."""
RECORD_DELAYS = (0.2, 2.0)
"""The first and the longest delay between two tries to record, in seconds."""

_DIGEST_IN_KEY = re.compile(r"-([0-9a-f]{64})$")
_VALID_KEY = re.compile(rb"[!-~]{1,255}")
_UNCERTAIN = frozenset(
    error.code
    for error in (
        BlobsUnavailable,
        CoordinationUnavailable,
        DatabaseUnavailable,
        LeaseLost,
        NodeUnreachable,
        SpoolFull,
    )
)
"""Codes of responses after which the request may or may not have been served."""
_NOT_RECORDED = frozenset(
    {"connection", "content-length", "date", "set-cookie", "transfer-encoding"}
)
"""Headers that belong to one transmission."""


class Idempotency:
    """Belongs inside authentication, which identifies the caller, and the body limit."""

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
        self._active: Counter[str] = Counter()
        """Requests that this process serves, by id."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        keys = [value for name, value in scope["headers"] if name == HEADER]
        path: str = scope["path"]
        # Holders of a signed link have no API key; nothing is stored for them.
        if not keys or not path.startswith(PREFIX) or path.startswith(SIGNED):
            await self._app(scope, receive, send)
            return
        if len(keys) > 1 or _VALID_KEY.fullmatch(keys[0]) is None:
            await problem(_bad_key())(scope, receive, send)
            return
        owner: str = scope.get("atoll.key", "embedded")
        request_id = hashlib.sha256(f"{owner}\n".encode() + keys[0]).hexdigest()
        # Before the first await: a concurrent request must see that this claim is in use.
        self._active[request_id] += 1
        try:
            body = HashedRequestBody(scope, receive, keys[0])
            await self._serve(request_id, body, scope, receive, send)
        finally:
            self._active[request_id] -= 1
            if not self._active[request_id]:
                del self._active[request_id]

    async def _serve(
        self, request_id: str, body: HashedRequestBody, scope: Scope, receive: Receive, send: Send
    ) -> None:
        await body.begin()
        if body.aborted:
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
                response = await self._recorded_response(found, found.status, body)
                await response(scope, receive, send)
                return
            if found is not None:
                claim = await self._take_over(found, body)
        except AtollError as error:
            await problem(error)(scope, receive, send)
            return
        scope["atoll.seed"] = _seed(claim)
        await self._run(claim, scope, body, send)

    async def _recorded_response(
        self, found: KeyedRequest, status: int, body: HashedRequestBody
    ) -> Response:
        await body.drain()
        if body.fingerprint != found.fingerprint:
            raise _key_reused()
        content: bytes | None = found.body
        if found.kept is not None:
            content = await self._stored(found.kept)
        if content is None:
            raise PermanentError(
                "This request was served before, but its recorded response is lost.",
                code="answer_lost",
            )
        return Response(content, status, {**found.headers, REPLAYED: "true"})

    async def _stored(self, key: str) -> bytes | None:
        """A response in the blob store; None if it is missing or damaged."""
        try:
            content = await self._blobs.get(key, limit=MAX_BUFFERED)
        except OversizedBlob:
            return None
        # Keys that an earlier version of Atoll wrote contain no digest.
        named = _DIGEST_IN_KEY.search(key)
        if content is None or named is None or await _digest(content) == named[1]:
            return content
        return None

    async def _take_over(self, found: KeyedRequest, body: HashedRequestBody) -> KeyedRequest:
        """Make an unanswered claim ours, unless its holder still works on it."""
        if body.complete and found.fingerprint not in (None, body.fingerprint):
            raise _key_reused()
        replica = self._coordination.replica
        if found.holder == replica:
            busy = self._active[found.id] > 1
        else:
            busy = found.holder != NO_HOLDER and await self._coordination.alive(found.holder)
        # The next request with this key is compared with what is known of this one.
        found = replace(found, fingerprint=found.fingerprint or body.fingerprint)
        # Our own claim too: it may have been answered since it was read.
        if busy or not await self._store.requests.take_over(found, replica):
            raise TemporaryError(
                "The first request with this Idempotency-Key is still in progress. Retry later to "
                "get its response.",
                code="idempotency_in_flight",
            )
        log.info("request.taken_over", request_id=found.id, holder=found.holder)
        return replace(found, holder=replica)

    async def _run(
        self, claim: KeyedRequest, scope: Scope, body: HashedRequestBody, send: Send
    ) -> None:
        response = BufferedResponse(send, lambda: self._release(claim, body))
        failure: Exception | None = None
        try:
            await self._app(scope, body.receive, response.send)
        except Exception as error:  # noqa: BLE001 - raised again when its response is recorded
            failure = error
        with contextlib.suppress(TooLarge):
            await body.drain()
        try:
            await self._settle(claim, body, response)
        except TemporaryError:
            # The request was served, so the client gets its response; a crash now would forget it.
            await response.deliver()
            await self._settle_later(claim, body, response)
        await response.deliver()
        if failure is not None:
            raise failure

    async def _settle(
        self, claim: KeyedRequest, body: HashedRequestBody, response: BufferedResponse
    ) -> None:
        requests = self._store.requests
        if not body.complete:
            await requests.forget(claim.id, claim.holder)
        elif not response.complete or _retryable_code(response) in _UNCERTAIN:
            await requests.take_over(claim, NO_HOLDER)
        elif response.status in RETRYABLE or "retry-after" in response.headers:
            await requests.forget(claim.id, claim.holder)
        else:
            await self._record(claim, body, response)

    async def _release(self, claim: KeyedRequest, body: HashedRequestBody) -> None:
        """
        Give the claim up when an event stream starts: what it reports on exists under its seeded
        id. A client that lost the connection can repeat the request before this stream ends.
        """
        with contextlib.suppress(TemporaryError):  # Then `_settle` does it at the end.
            known = replace(claim, fingerprint=claim.fingerprint or body.fingerprint)
            await self._store.requests.take_over(known, NO_HOLDER)

    async def _settle_later(
        self, claim: KeyedRequest, body: HashedRequestBody, response: BufferedResponse
    ) -> None:
        """Part of the request, although its client has the response: a shutdown waits for it."""
        delay, longest = RECORD_DELAYS
        deadline = self._clock.monotonic() + RECORD_TIMEOUT
        while self._clock.now() < claim.expires_at:
            await asyncio.sleep(delay)
            delay = min(delay * 2, longest)
            try:
                if self._clock.monotonic() < deadline:
                    await self._settle(claim, body, response)
                else:
                    response.body.clear()
                    await self._store.requests.take_over(claim, NO_HOLDER)
            except TemporaryError as error:
                log.warning("request.not_recorded", request_id=claim.id, error=error.message)
            else:
                return

    async def _record(
        self, claim: KeyedRequest, body: HashedRequestBody, response: BufferedResponse
    ) -> None:
        content, blob_key = bytes(response.body), None
        if len(content) > INLINE:
            # A replica that was taken for lost must not overwrite the response of its successor.
            blob_key = f"requests/{_seed(claim).digest}/{claim.holder}-{await _digest(content)}"
            await self._blobs.put(blob_key, content)
        headers = {
            name: text for name, text in response.headers.items() if name not in _NOT_RECORDED
        }
        await self._store.requests.answer(
            replace(
                claim,
                fingerprint=body.fingerprint,
                status=response.status,
                headers=headers,
                body=content if blob_key is None else b"",
                kept=blob_key,
            )
        )


async def _digest(content: bytes) -> str:
    return (await asyncio.to_thread(hashlib.sha256, content)).hexdigest()


def _seed(claim: KeyedRequest) -> Seed:
    text = f"{claim.id} {claim.created_at.isoformat()}"
    return Seed(hashlib.sha256(text.encode()).hexdigest(), claim.created_at)


def _retryable_code(response: BufferedResponse) -> str | None:
    """The code of a response that asks the client to retry."""
    if response.status not in RETRYABLE:
        return None
    try:
        content = json.loads(bytes(response.body))
    except ValueError:
        return None
    return content.get("code") if isinstance(content, dict) else None


def _bad_key() -> InvalidRequest:
    return InvalidRequest(
        "Idempotency-Key: send one header with 1 to 255 visible ASCII characters.",
        code="bad_idempotency_key",
    )


def _key_reused() -> InvalidRequest:
    return InvalidRequest(
        "This Idempotency-Key was used for a different request. Use a new key for a new request.",
        code="idempotency_key_reused",
    )
