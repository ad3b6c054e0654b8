"""The secrets of a session: variables whose values can be set and not read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.sdk.arguments import check_text
from atoll.sdk.paths import segment

if TYPE_CHECKING:
    from atoll.sdk.connection import Connection


class AsyncSecrets:
    """Environment variables of all that runs in the session; the server tells their names only."""

    def __init__(self, connection: Connection, path: str) -> None:
        self._connection = connection
        self._path = f"{path}/secrets"

    async def set(self, name: str, value: str) -> None:
        """Give it to whatever is run from now on; what runs already keeps what it has."""
        check_text(name=name, value=value)
        path = f"{self._path}/{segment(name)}"
        await self._connection.call("PUT", path, body={"value": value})

    async def remove(self, name: str) -> None:
        """Raises `NotFound` when there is none of this name."""
        await self._connection.call("DELETE", f"{self._path}/{segment(name)}")

    async def list(self) -> tuple[str, ...]:
        """Their names."""
        answer = await self._connection.call("GET", self._path)
        return tuple(answer["items"])
