"""
Slots of a session on this replica: at most `capacity` executions at once, first come, first served.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Slot:
    """A place in the queue, and one of the session's slots once it is granted."""

    def __init__(self, queue: SlotQueue, moved: Callable[[], None]) -> None:
        self._queue = queue
        self._moved = moved
        self._granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number: int | None = None

    @property
    def waiting(self) -> bool:
        return not self._granted.done()

    @property
    def granted(self) -> bool:
        return self._number is not None

    @property
    def number(self) -> int:
        """Which of the session's slots it is; only after it was granted."""
        assert self._number is not None
        return self._number

    @property
    def position(self) -> int:
        """How many executions are before this one, running ones too."""
        return self._queue.position(self)

    async def wait(self) -> None:
        """Wait until the slot is granted or given up."""
        await self._granted

    def grant(self, number: int) -> None:
        self._number = number
        self._granted.set_result(None)

    def give_up(self) -> None:
        """Stop waiting without a slot; `leave` is still to be called."""
        if self.waiting:
            self._granted.set_result(None)

    def moved(self) -> None:
        """The position has changed."""
        self._moved()

    def leave(self) -> None:
        self._queue.leave(self)


class SlotQueue:
    def __init__(self, capacity: int = 1) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._held: set[Slot] = set()
        self._waiting: deque[Slot] = deque()
        self._joining = 0

    @property
    def used(self) -> bool:
        return bool(self._held or self._waiting or self._joining)

    @property
    def waiting(self) -> int:
        """Number of executions that wait for a slot or are about to."""
        return len(self._waiting) + self._joining

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Count an execution that is being recorded, and joins afterwards."""
        self._joining += 1
        try:
            yield
        finally:
            self._joining -= 1

    def join(self, moved: Callable[[], None] = lambda: None) -> Slot:
        """Take a place; `moved` is called when the position changes. The slot is to be left."""
        slot = Slot(self, moved)
        if self._free:
            self._held.add(slot)
            slot.grant(self._free.pop())
        else:
            self._waiting.append(slot)
        return slot

    def position(self, slot: Slot) -> int:
        with contextlib.suppress(ValueError):
            return len(self._held) + self._waiting.index(slot)
        return 0

    def leave(self, slot: Slot) -> None:
        if slot in self._held:
            self._held.remove(slot)
            self._pass_on(slot.number)
        else:
            with contextlib.suppress(ValueError):  # It was given up, and has been skipped.
                self._waiting.remove(slot)
        for following in self._waiting:
            following.moved()

    def _pass_on(self, number: int) -> None:
        while self._waiting:
            following = self._waiting.popleft()
            if following.waiting:
                self._held.add(following)
                following.grant(number)
                return
        self._free.append(number)
