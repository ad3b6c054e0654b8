"""
An object that is created by `await`, or for an `async with` block.

    session = await atoll.session()
    async with atoll.session() as session: ...
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import TracebackType


class AsyncCloseable(Protocol):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


T = TypeVar("T", bound=AsyncCloseable)


class Pending(Coroutine[Any, Any, T]):
    """An object that is not created yet. It is a coroutine, so it can also become a task."""

    def __init__(self, call: str, creation: Coroutine[Any, Any, T]) -> None:
        self._call = call
        """The call that returned it, for messages."""
        self._creation = creation
        self._created: T | None = None

    def __await__(self) -> Generator[Any, Any, T]:
        return self._creation.__await__()

    def send(self, value: Any) -> Any:
        return self._creation.send(value)

    def throw(self, *error: Any) -> Any:
        return self._creation.throw(*error)

    def close(self) -> None:
        self._creation.close()

    async def __aenter__(self) -> T:
        self._created = await self._creation
        return await self._created.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._created is not None
        await self._created.__aexit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<{self._call}(…), not awaited>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                call = self._call
                message = f"Await it first: `await {call}(…)`, or `async with {call}(…) as …:`."
            raise AttributeError(message, name=name, obj=self)
