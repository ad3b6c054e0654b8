"""
What requests are sent on: an HTTP client for a server, or direct calls of an embedded one.

The implementations are in modules of their own, because an HTTP client takes long to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager


class ServerUnreachable(TemporaryError):
    """The server is unreachable, or the connection was lost before the response was complete."""

    code = "server_unreachable"

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent
        """Whether the server may have received the request."""


class Response(Protocol):
    """A response whose body is read on demand."""

    @property
    def status_code(self) -> int: ...
    @property
    def is_success(self) -> bool: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    async def aread(self) -> bytes: ...
    def aiter_raw(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
        """The body. `chunk_size` avoids small pieces of it where they would cost time."""
        ...


class Connection(Protocol):
    def stream(
        self,
        method: str,
        target: str,
        *,
        content: bytes | AsyncIterable[bytes] | None,
        headers: Mapping[str, str],
        timeout: float,
    ) -> AbstractAsyncContextManager[Response]:
        """
        Send a request. `target` is relative to the root of the API, and `timeout` in seconds. All
        failures are `AtollError`s, those of the caller's block too.
        """
        ...

    async def close(self) -> None: ...


def server_timeout(name: str, method: str, target: str, timeout: float) -> TemporaryError:
    path = target.partition("?")[0]
    return TemporaryError(
        f"{name} did not answer {method} {path} within {timeout:g} s.", code="server_timeout"
    )
