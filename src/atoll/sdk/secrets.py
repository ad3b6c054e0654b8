"""Secrets of a session: environment variables whose values can be set but not read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.sdk.arguments import check_string
from atoll.sdk.paths import url_segment

if TYPE_CHECKING:
    from atoll.sdk.http_client import HttpClient


class AsyncSecrets:
    """Environment variables of a session. The server returns only their names."""

    def __init__(self, http: HttpClient, path: str) -> None:
        self._http = http
        self._path = f"{path}/secrets"

    async def set(self, name: str, value: str) -> None:
        """Set a secret for later executions. Running ones keep the old value."""
        check_string(name=name, value=value)
        path = f"{self._path}/{url_segment(name)}"
        await self._http.call("PUT", path, body={"value": value})

    async def remove(self, name: str) -> None:
        """Remove a secret. Raises `NotFound` if it does not exist."""
        await self._http.call("DELETE", f"{self._path}/{url_segment(name)}")

    async def list(self) -> tuple[str, ...]:
        """Names of the secrets."""
        answer = await self._http.call("GET", self._path)
        return tuple(answer["items"])
