"""
Client of the Kubernetes API: requests with JSON, watches, and WebSocket streams of pods.

Every request ends within the time-out of the settings. A server that is overloaded says how long to
wait (`Retry-After`); the request is repeated within its time, and fails as temporary after that.
Work of the background (`PATIENT`) has fewer connections, so that it never delays what clients wait
for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from enum import Enum
from typing import TYPE_CHECKING, Any

import aiohttp

from atoll.drivers.kubernetes.errors import (
    TOO_MANY_REQUESTS,
    UNAUTHORIZED,
    UNAVAILABLE,
    ApiError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from atoll.drivers.kubernetes.access import ClusterAccess
    from atoll.settings import KubernetesSettings

OPENED = "OPENED"
"""Type of the first event of a watch, which the server does not send."""
CLOSE_TIMEOUT = 1.0
"""Seconds for the other end of a stream to confirm that it is closed."""
FIELD_MANAGER = "atoll"
APPLY = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
PATIENT_REQUESTS = 8
"""Requests of the background at the same time."""
REQUESTS = 64
FIRST_DELAY, MAX_DELAY = 0.2, 10.0
"""Seconds before a request is repeated that the server did not accept."""
MAX_LINE = 4 * 1024 * 1024
"""Bytes of one event of a watch; an object has at most 1.5 MiB in etcd."""
CHANNELS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
"""Subprotocols of streams, the best first."""
PORT_CHANNELS = ("v4.channel.k8s.io",)
"""A forwarded port has no newer one with these frames."""


class Priority(Enum):
    URGENT = "urgent"
    """A client waits for it."""
    PATIENT = "patient"


class ApiClient:
    def __init__(self, access: ClusterAccess, settings: KubernetesSettings) -> None:
        self._access = access
        self._timeout = settings.timeout.total_seconds()
        self._slots = {
            Priority.URGENT: asyncio.Semaphore(REQUESTS),
            Priority.PATIENT: asyncio.Semaphore(PATIENT_REQUESTS),
        }
        self._session: aiohttp.ClientSession
        self.requests = 0
        """How many requests were sent, for measurements."""

    @property
    def server(self) -> str:
        return self._access.server

    async def open(self) -> None:
        connector = aiohttp.TCPConnector(
            limit=0, ssl=True if self._access.tls is None else self._access.tls
        )
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        )

    async def close(self) -> None:
        await self._session.close()

    # Requests

    async def get(self, path: str, **params: str) -> dict[str, Any]:
        return await self.request("GET", path, params=params)

    async def apply(
        self, path: str, manifest: Mapping[str, Any], *, priority: Priority = Priority.URGENT
    ) -> dict[str, Any]:
        """Create an object or change it to this (server-side apply)."""
        params = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self.request(
            "PATCH", path, manifest, params=params, content_type=APPLY, priority=priority
        )

    async def patch(
        self,
        path: str,
        change: Any,
        *,
        kind: str = MERGE_PATCH,
        priority: Priority = Priority.URGENT,
    ) -> dict[str, Any]:
        params = {"fieldManager": FIELD_MANAGER}
        return await self.request(
            "PATCH", path, change, params=params, content_type=kind, priority=priority
        )

    async def delete(self, path: str, **options: Any) -> None:
        await self.request("DELETE", path, options or None)

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        priority: Priority = Priority.URGENT,
    ) -> dict[str, Any]:
        """The answer as JSON. Raises `ApiError`, `aiohttp.ClientError` and `TimeoutError`."""
        loop = asyncio.get_running_loop()
        data = None if body is None else json.dumps(body).encode()
        async with asyncio.timeout(self._timeout), self._slots[priority]:
            deadline, delay = loop.time() + self._timeout, FIRST_DELAY
            while True:
                try:
                    return await self._once(method, path, data, params, content_type)
                except ApiError as error:
                    if error.status == UNAUTHORIZED and delay == FIRST_DELAY:
                        self._access.expire()
                    elif error.status not in (TOO_MANY_REQUESTS, UNAVAILABLE):
                        raise
                    pause = max(delay, error.retry_after)
                    if loop.time() + pause > deadline:
                        raise
                await asyncio.sleep(pause)
                delay = min(delay * 2, MAX_DELAY)

    async def _once(
        self,
        method: str,
        path: str,
        data: bytes | None,
        params: Mapping[str, str] | None,
        content_type: str,
    ) -> dict[str, Any]:
        headers = await self._access.headers()
        if data is not None:
            headers["Content-Type"] = content_type
        self.requests += 1
        async with self._session.request(
            method, f"{self.server}{path}", data=data, params=params, headers=headers
        ) as response:
            content = await response.read()
        if response.status >= 400:
            raise _error(response.status, response.headers, content)
        result: dict[str, Any] = json.loads(content)
        return result

    async def may(
        self, namespace: str, verb: str, resource: str, *, subresource: str = "", group: str = ""
    ) -> bool:
        """Whether Atoll has a permission."""
        attributes = {
            "namespace": namespace,
            "verb": verb,
            "group": group,
            "resource": resource,
            "subresource": subresource,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = await self.request("POST", path, review)
        return bool(answer["status"]["allowed"])

    # Watches

    async def watch(self, path: str, **params: str) -> AsyncGenerator[dict[str, Any]]:
        """
        `OPENED`, then the events of a watch until the server ends it. The time-out is for the first
        answer.
        """
        headers = await self._access.headers()
        params = {**params, "watch": "true", "allowWatchBookmarks": "true"}
        self.requests += 1
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(self._timeout):
                response = await stack.enter_async_context(
                    self._session.get(f"{self.server}{path}", params=params, headers=headers)
                )
                if response.status >= 400:
                    if response.status == UNAUTHORIZED:
                        self._access.expire()
                    raise _error(response.status, response.headers, await response.read())
            # Aborted at the end: a loop that ends cannot wait until TLS is closed in order.
            stack.callback(_abort, response)
            yield {"type": OPENED}
            line = b""
            async for piece in response.content.iter_any():
                *lines, line = (line + piece).split(b"\n")
                for one in lines:
                    if one:
                        yield json.loads(one)
                if len(line) > MAX_LINE:
                    raise aiohttp.ClientPayloadError(f"An event of {path} is too long.")

    # Streams

    async def stream(
        self, path: str, params: list[tuple[str, str]], channels: tuple[str, ...] = CHANNELS
    ) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket stream, such as that of `attach` or `portforward`."""
        headers = await self._access.headers()
        self.requests += 1
        try:
            async with asyncio.timeout(self._timeout):
                return await self._session.ws_connect(
                    f"{self.server}{path}",
                    params=params,
                    headers=headers,
                    protocols=channels,
                    max_msg_size=MAX_LINE,
                    heartbeat=None,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT),
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status == UNAUTHORIZED:
                self._access.expire()
            raise ApiError(error.status, "Stream", f"{error.message} ({path})") from error


def _abort(response: aiohttp.ClientResponse) -> None:
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()


def _error(status: int, headers: Mapping[str, str], content: bytes) -> ApiError:
    """From the `Status` object that the server answers with, or any other text."""
    reason, message = "", content[:1000].decode(errors="replace").strip()
    with contextlib.suppress(ValueError, AttributeError):
        found = json.loads(content)
        reason, message = found.get("reason") or "", found.get("message") or message
    retry_after = 1.0
    with contextlib.suppress(KeyError, ValueError):
        retry_after = float(headers["Retry-After"])
    return ApiError(status, reason, message or f"HTTP {status}", retry_after)
