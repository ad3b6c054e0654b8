"""The secrets of a session: variables whose values can be set and not read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.sdk.arguments import check_string
from atoll.sdk.paths import url_segment

if TYPE_CHECKING:
    from atoll.sdk.http_client import HttpClient


class AsyncSecrets:
    """Environment variables of all that runs in the session; the server tells their names only."""

    def __init__(self, http: HttpClient, path: str) -> None:
        self._http = http
        self._path = f"{path}/secrets"

    async def set(self, name: str, value: str) -> None:
        """Give it to whatever is run from now on; what runs already keeps what it has."""
        check_string(name=name, value=value)
        path = f"{self._path}/{url_segment(name)}"
        await self._http.call("PUT", path, body={"value": value})

    async def remove(self, name: str) -> None:
        """Raises `NotFound` when there is none of this name."""
        await self._http.call("DELETE", f"{self._path}/{url_segment(name)}")

    async def list(self) -> tuple[str, ...]:
        """Their names."""
        answer = await self._http.call("GET", self._path)
        return tuple(answer["items"])
