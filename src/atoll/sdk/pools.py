"""Warm pools: ready instances by template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.sdk.values import PoolInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.sdk.http_client import HttpClient


class AsyncPools:
    """Warm pools of the replica that responds."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    def list(self) -> AsyncIterator[PoolInfo]:
        return self._http.items(PoolInfo, "pools")
