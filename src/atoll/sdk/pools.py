"""Pools: ready instances, by template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.sdk.decode import decode
from atoll.sdk.values import PoolInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.sdk.connection import Connection


class AsyncPools:
    """The warm pools of the control plane that answers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def list(self) -> AsyncIterator[PoolInfo]:
        async for item in self._connection.pages("pools"):
            yield decode(PoolInfo, item)
