"""An installation in progress: the number of waiting sessions, and its output."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from atoll.model.packages import PackageSet

LOG_LIMIT = 256 * 1024
"""Bytes of the log; of a longer one the beginning and the end are kept."""


class RunningInstall:
    def __init__(self) -> None:
        self.task: asyncio.Task[PackageSet] | None = None
        self.waiting = 0
        self.size = 0
        self.failed_temporarily = False
        """Whether the index did not answer."""
        self.listeners: list[Callable[[bytes], None]] = []
        """Functions that receive the output."""
        self._head = bytearray()
        self._tail = bytearray()

    def add_output(self, data: bytes) -> None:
        for listener in self.listeners:
            listener(data)
        self.size += len(data)
        room = LOG_LIMIT // 2 - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: -LOG_LIMIT // 2]

    def say(self, words: str) -> None:
        self.add_output(f"atoll: {words}\n".encode())

    @property
    def text(self) -> bytes:
        lost = self.size - len(self._head) - len(self._tail)
        between = f"\n... {lost} bytes omitted ...\n".encode() if lost else b""
        return bytes(self._head) + between + bytes(self._tail)
