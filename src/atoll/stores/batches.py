"""Reads all entities of a store, a batch at a time. Entities added meanwhile may be missed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from atoll.model.page import Page


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T")
WithId = TypeVar("WithId", bound=_HasId)

BATCH = 100


async def by_id(
    read: Callable[..., Awaitable[list[WithId]]], **where: Any
) -> AsyncIterator[WithId]:
    """`read` is a method of a store with `after` and `limit`; `where` are its other arguments."""
    after = ""
    while batch := await read(limit=BATCH, after=after, **where):
        for entity in batch:
            yield entity
        after = batch[-1].id


async def by_page(read: Callable[..., Awaitable[Page[T]]], **where: Any) -> AsyncIterator[T]:
    """`read` is a method `page` of a store; `where` are its other arguments."""
    cursor: str | None = None
    while True:
        page = await read(cursor=cursor, limit=BATCH, **where)
        for entity in page.items:
            yield entity
        cursor = page.next_cursor
        if cursor is None:
            return
