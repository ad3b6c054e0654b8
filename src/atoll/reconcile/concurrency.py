"""Handles many items at once, but not too many."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

T = TypeVar("T")


async def for_each(
    items: Iterable[T], handle: Callable[[T], Awaitable[object]], *, at_once: int
) -> None:
    """Call `handle` with each item, with `at_once` of them at a time. It must not raise."""
    slots = asyncio.Semaphore(at_once)

    async def limited(item: T) -> None:
        async with slots:
            await handle(item)

    async with asyncio.TaskGroup() as group:
        for item in items:
            group.create_task(limited(item))
