"""
HTTP requests to one server, remote or embedded.

The first request opens the connection. All failures are `AtollError`s: the error that the server
returned, or a `TemporaryError` (`server_unreachable`, `server_timeout`) if it did not respond.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack
from urllib.parse import quote, urlencode

from atoll.errors import Conflict, InvalidRequest, NotFound, PermanentError, TemporaryError
from atoll.sdk.arguments import given
from atoll.sdk.connection import ServerUnreachable
from atoll.sdk.decode import decode
from atoll.sdk.error_response import error_from_response
from atoll.sdk.retry import Backoff
from atoll.sdk.tls_errors import wrong_scheme_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from atoll.errors import AtollError
    from atoll.sdk.connection import Connection, Response
    from atoll.sdk.endpoint import Endpoint
    from atoll.sdk.in_process_connection import ASGIApp
    from atoll.sdk.websocket import Socket

T = TypeVar("T")

_CONNECT_TIMEOUT = 5.0
_REPEATABLE = frozenset({"GET", "HEAD", "PUT", "DELETE"})
_CONDITIONS = frozenset({"if-match", "if-none-match"})
"""With these headers a repeated request may fail because its first try succeeded."""
_RESTARTING = frozenset({"shutting_down", "unavailable"})
"""Error codes of a restarting server, or of a gateway in front of it."""


class Request(TypedDict, total=False):
    body: Any
    """A JSON value, or bytes or an async iterable to send unchanged."""
    query: Mapping[str, Any]
    headers: Mapping[str, str]
    wait: float
    """Extends the timeout by the seconds that the server was asked to wait."""


class HttpClient:
    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self.endpoint = endpoint
        self.has_responded = False
        """Whether the server has ever responded. If so, an outage is probably temporary."""
        self._timeout = timeout
        self._opening = asyncio.Lock()
        self._resources = AsyncExitStack()
        self._connection: Connection | None = None
        self._closed = False
        self._app: ASGIApp | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    async def open(self) -> Connection:
        if self._connection is not None:
            return self._connection
        async with self._opening:
            if self._closed:
                raise RuntimeError("This client is closed.")
            if self._connection is None:
                async with AsyncExitStack() as stack:
                    connection = await self._connect(stack)
                    self._resources = stack.pop_all()
                    self._connection = connection
            return self._connection

    async def close(self) -> None:
        async with self._opening:
            self._closed, self._connection = True, None
            await self._resources.aclose()

    async def fetch(
        self,
        kind: type[T],
        method: str,
        path: str,
        *,
        once: bool | None = None,
        **request: Unpack[Request],
    ) -> T:
        """The response of `call`, decoded."""
        return decode(kind, await self.call(method, path, once=once, **request))

    async def items(
        self, kind: type[T], path: str, query: Mapping[str, Any] | None = None
    ) -> AsyncIterator[T]:
        """Items of all pages. Each page is fetched when the previous one is used up."""
        cursor: str | None = None
        while True:
            page = await self.call("GET", path, query={**(query or {}), "cursor": cursor})
            for item in page["items"]:
                yield decode(kind, item)
            cursor = page.get("next_cursor")
            if cursor is None:
                return

    async def call(
        self, method: str, path: str, *, once: bool | None = None, **request: Unpack[Request]
    ) -> Any:
        """
        The JSON of the response.

        If a server that has responded before becomes unavailable, the request is repeated for at
        most 30 s, as long as that is safe: it was never sent, or it is idempotent (`once`; by
        default the method decides).
        """
        streamed = isinstance(request.get("body"), AsyncIterable)
        conditional = not _CONDITIONS.isdisjoint(map(str.lower, request.get("headers") or ()))
        if once is None:
            once = method in _REPEATABLE and not conditional
        repeatable = once and not streamed
        backoff, maybe_deleted = Backoff(), False
        while True:
            try:
                return await self.try_call(method, path, **request)
            except NotFound:
                if not (maybe_deleted and method == "DELETE"):
                    raise
                return None  # An earlier try deleted it, but its response was lost.
            except TemporaryError as error:
                sent = error.code in _RESTARTING or (
                    isinstance(error, ServerUnreachable) and error.sent
                )
                unsent = isinstance(error, ServerUnreachable) and not error.sent
                if not self.has_responded or not (unsent or (sent and repeatable)):
                    raise
                maybe_deleted |= sent
                await backoff.wait_or_raise(error)

    async def try_call(self, method: str, path: str, **request: Unpack[Request]) -> Any:
        """Like `call`, but without retries."""
        async with self.stream(method, path, **request) as response:
            text = await response.aread()
        if not text:
            return None
        try:
            return json.loads(text)
        except ValueError:
            raise PermanentError(
                f"{self.endpoint.name} answered {method} {path} with something that is not JSON. "
                "Check that the URL is that of an Atoll server.",
                code="bad_answer",
            ) from None

    async def call_once(
        self,
        path: str,
        *,
        key: str | None = None,
        body: Any,
        headers: Mapping[str, str] | None = None,
        wait: float = 0.0,
    ) -> Any:
        """
        The response to an idempotent POST: one with a key, or with an id in its body.
        """
        sent_headers = {**(headers or {}), **({} if key is None else {"idempotency-key": key})}
        backoff = Backoff()
        while True:
            try:
                return await self.call(
                    "POST", path, body=body, headers=sent_headers, wait=wait, once=True
                )
            except Conflict as error:
                if error.code != "idempotency_in_flight":
                    raise
                await backoff.wait_or_raise(error)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        wait: float = 0.0,
    ) -> AsyncIterator[Response]:
        """A successful response whose body is not read yet."""
        connection = await self.open()
        headers = dict(headers or {})
        content = body
        if body is not None and not isinstance(body, bytes | AsyncIterable):
            content = _json(body)
            headers["content-type"] = "application/json"
        # The HTTP client would refuse file names with bytes that are not UTF-8.
        text = urlencode(given(**query), errors="surrogateescape", quote_via=quote) if query else ""
        async with connection.stream(
            method,
            f"{path}?{text}" if text else path,
            content=content,
            headers=headers,
            timeout=self._timeout + wait,
        ) as response:
            self.has_responded = True
            if not response.is_success:
                raise await self._refusal(response)
            yield response

    async def _refusal(self, response: Response) -> AtollError:
        body = await response.aread()
        status, headers = response.status_code, response.headers
        return wrong_scheme_error(self.endpoint, status, headers, body) or error_from_response(
            status, headers, body, self.endpoint.key_origin
        )

    async def socket(self, path: str, query: Mapping[str, str]) -> Socket:
        """A WebSocket."""
        from atoll.sdk.websocket import connect

        await self.open()
        timeout = min(_CONNECT_TIMEOUT, self._timeout) if self._app is None else self._timeout
        websocket = await connect(self.endpoint, path, query, timeout, self._app)
        self.has_responded = True
        return websocket

    async def _connect(self, stack: AsyncExitStack) -> Connection:
        if self.endpoint.url is not None:
            from atoll.sdk.server_connection import ServerConnection

            server = ServerConnection(self.endpoint, min(_CONNECT_TIMEOUT, self._timeout))
            stack.push_async_callback(server.close)
            return server
        from atoll.sdk.embedded import EmbeddedServer, application, without_garbage_collection
        from atoll.sdk.in_process_connection import InProcessConnection

        with without_garbage_collection():
            host = EmbeddedServer(application(self.endpoint.settings))
            self._app = await host.start()
        stack.push_async_callback(host.stop)
        connection = InProcessConnection(self._app, self.endpoint.name)
        stack.push_async_callback(connection.close)
        return connection


def new_key() -> str:
    """An idempotency key, which makes a request repeatable."""
    return secrets.token_hex(16)


def _json(body: Any) -> bytes:
    try:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"Cannot encode the request as JSON: {error}", code="not_json"
        ) from None
