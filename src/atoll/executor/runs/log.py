"""
What a run has told so far, in order, and who hears it.

An entry has a number, a channel and bytes. As long as nobody was sent an entry it may grow, so what
comes in small pieces is gathered and the log goes by the bytes and not by the writes; from then on
it stays as it is, and one who comes back asks from the last number on. JSON on a channel of its own
(questions, displays) is one line, which may take several entries.

A log with a ring keeps the last bytes and lets old entries go; their numbers are not used again.
"""

from __future__ import annotations

import time

from ...protocol import frames
from ..connection import LAZY_SECONDS, Stream
from ..event_loop import Loop, Timer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GATHER = 32_768
"""So many bytes of output are sent without waiting for more."""
GATHER_SECONDS = 0.1
"""The longest wait for more, of a run that has written often."""
OFTEN = 4096
"""From so many entries on the wait is longer still: an entry costs more than its bytes."""

RING_SECONDS = 0.02
"""The wait for more in a ring that was sent just before: echoes of keys are not held up longer."""
QUIET_SECONDS = 0.05
RING_ENTRIES = 8192
"""The most entries of a ring, however small they are."""


class Follower:
    """One who hears of a run, at their own pace."""

    __slots__ = ("announced", "sent", "stream")

    def __init__(self, stream: Stream, sent: int) -> None:
        self.stream = stream
        self.sent = sent
        """Number of the last entry that went out."""
        self.announced = False


class Log:
    def __init__(self, loop: Loop, ring: int | None = None) -> None:
        self._loop = loop
        self._ring = ring
        self._size = 0
        self._tails: dict[int, bytearray] = {}
        """By channel, the last entry as long as it may grow."""
        self._gathered = 0
        """Bytes that came since they were last sent."""
        self._gathering: Timer | None = None
        self._sent_at = 0.0
        self.entries: list[tuple[int, bytes | bytearray]] = []
        """Channel and content."""
        self.dropped = 0
        """How many entries have left at the front."""
        self.followers: list[Follower] = []
        self.begun = False
        """Whether followers are told that it has started."""
        self.result: dict[str, Any] | None = None

    @property
    def last(self) -> int:
        """The number of the last entry."""
        return self.dropped + len(self.entries)

    def numbered(self) -> list[tuple[int, int, bytes | bytearray]]:
        """Number, channel and content of what is there."""
        first = self.dropped + 1
        return [(first + n, channel, data) for n, (channel, data) in enumerate(self.entries)]

    def restore(self, numbered: list[tuple[int, int, bytes]], result: dict[str, Any]) -> None:
        """Be the log of a run that ended in another executor."""
        self.dropped = numbered[0][0] - 1 if numbered else 0
        self.entries = [(channel, data) for _, channel, data in numbered]
        self.result = result

    def keep(self, channel: int, data: bytes) -> None:
        """Sent soon, with what follows it, or at once if it is much."""
        self._gathered += len(data)
        self._size += len(data)
        while data:
            tail = self._tails.get(channel)
            if tail is None or len(tail) >= frames.CHUNK:
                tail = self._tails[channel] = bytearray()
                self.entries.append((channel, tail))
            room = frames.CHUNK - len(tail)
            tail += data[:room]
            data = data[room:]
        self._forget()
        if self._gathered >= GATHER:
            self.send()
        elif self._gathering is None and self.followers:
            self._gathering = self._loop.after(self._wait(), self.send)

    def _wait(self) -> float:
        """How long to wait for more, in seconds."""
        if self._ring is not None:
            # A terminal may be used for hours; who types sees it at once, first and last.
            quiet = time.monotonic() - self._sent_at > QUIET_SECONDS
            return LAZY_SECONDS if quiet else RING_SECONDS
        seconds = min(LAZY_SECONDS * (1 + self.last / 256), GATHER_SECONDS)
        if self.last > OFTEN:
            seconds = min(1.0, seconds * self.last / OFTEN)
        return seconds

    def add(self, channel: int, line: bytes) -> None:
        """A line of JSON, sent at once."""
        line += b"\n"
        self._size += len(line)
        for start in range(0, len(line), frames.CHUNK):
            self.entries.append((channel, line[start : start + frames.CHUNK]))
        self._forget()
        self.send()

    def _forget(self) -> None:
        while self._ring is not None and (
            (self._size > self._ring and len(self.entries) > 1) or len(self.entries) > RING_ENTRIES
        ):
            channel, data = self.entries.pop(0)
            self.dropped += 1
            self._size -= len(data)
            if self._tails.get(channel) is data:
                del self._tails[channel]

    # Those who hear it

    def follow(self, follower: Follower) -> None:
        self.followers.append(follower)
        follower.stream.on_credit = lambda: self._send_to(follower)
        follower.stream.on_reset = lambda: self._leave(follower)
        if self.begun or self.result is not None:
            self.announce()
        self._send_to(follower)

    def _leave(self, follower: Follower) -> None:
        # A log may be large: nothing that is over keeps it.
        follower.stream.on_credit = follower.stream.on_reset = None
        if follower in self.followers:
            self.followers.remove(follower)

    def announce(self) -> None:
        for follower in self.followers:
            if not follower.announced:
                follower.announced = True
                follower.stream.event({"event": "started"})

    def beat(self) -> None:
        for follower in self.followers:
            follower.stream.event({"event": "heartbeat"})

    def end(self, result: dict[str, Any]) -> None:
        """All has been told: each follower gets the result after the last entry."""
        self.result = result
        self.announce()
        self.send()

    def send(self) -> None:
        self._gathered = 0
        self._sent_at = time.monotonic()
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        for follower in self.followers[:]:
            self._send_to(follower)

    def _send_to(self, follower: Follower) -> None:
        stream = follower.stream
        # What a slow one missed of a ring is gone.
        follower.sent = max(follower.sent, self.dropped)
        while follower.sent < self.last:
            index = follower.sent - self.dropped
            channel, data = self.entries[index]
            if stream.credit < len(data) + frames.OUTPUT_HEADER.size:
                return
            self.announce()
            if isinstance(data, bytearray):
                # From now on somebody may ask for what follows it: it stays as it is.
                if self._tails.get(channel) is data:
                    del self._tails[channel]
                data = bytes(data)
                self.entries[index] = (channel, data)
            follower.sent += 1
            stream.send(frames.OUTPUT, frames.OUTPUT_HEADER.pack(follower.sent, channel) + data)
        if self.result is not None and follower in self.followers:
            self._leave(follower)
            stream.end(self.result)
