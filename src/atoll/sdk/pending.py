"""
What is made by `await`, or for the length of an `async with`.

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
    """Something that is not made yet. It is a coroutine, so it can be a task as well."""

    def __init__(self, call: str, making: Coroutine[Any, Any, T]) -> None:
        self._call = call
        """How it was asked for, for messages."""
        self._making = making
        self._made: T | None = None

    def __await__(self) -> Generator[Any, Any, T]:
        return self._making.__await__()

    def send(self, value: Any) -> Any:
        return self._making.send(value)

    def throw(self, *error: Any) -> Any:
        return self._making.throw(*error)

    def close(self) -> None:
        self._making.close()

    async def __aenter__(self) -> T:
        self._made = await self._making
        return await self._made.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._made is not None
        await self._made.__aexit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<{self._call}(…), to be awaited>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                call = self._call
                message = f"Await it first: `await {call}(…)`, or `async with {call}(…) as …:`."
            raise AttributeError(message, name=name, obj=self)
