"""
The log of a run: its output in numbered entries, and the streams that follow it.

An entry has a number, a channel and bytes. It may grow until it is sent for the first time, so the
size of the log depends on the bytes and not on the number of writes. After that it never changes,
so that a follower can continue from the last number that it has. A line of JSON (questions,
displays) may take several entries.

The log of a terminal is a ring: it keeps the last bytes and drops old entries, whose numbers are
not used again.
"""

from __future__ import annotations

import time

from ...protocol import frames
from ..connection import LAZY_DELAY, Stream
from ..event_loop import Loop, Timer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BATCH = 32_768
"""Bytes of output that are sent without waiting for more."""
MAX_BATCH_DELAY = 0.1
"""The longest wait for more output of a run that has written often."""
MANY_ENTRIES = 4096
"""From this number of entries on the wait is longer still: each entry has a cost."""

RING_DELAY = 0.02
"""The wait on a terminal that has just received output; short, because keys are echoed."""
QUIET_AFTER = 0.05
RING_ENTRIES = 8192
"""Entries of a ring."""


class Follower:
    """A stream that receives a run's log at its own pace."""

    __slots__ = ("announced", "sent", "stream")

    def __init__(self, stream: Stream, sent: int) -> None:
        self.stream = stream
        self.sent = sent
        """Number of the last entry that was sent."""
        self.announced = False


class Log:
    def __init__(self, loop: Loop, ring: int | None = None) -> None:
        self._loop = loop
        self._ring = ring
        self._size = 0
        self._tails: dict[int, bytearray] = {}
        """The last entry of each channel, while it may grow."""
        self._unsent = 0
        """Bytes since the last `send`."""
        self._send_timer: Timer | None = None
        self._sent_at = 0.0
        self.entries: list[tuple[int, bytes | bytearray]] = []
        """Channel and content."""
        self.dropped = 0
        """Entries that were dropped at the front."""
        self.followers: list[Follower] = []
        self.begun = False
        """Whether the run has started; followers receive this as an event."""
        self.result: dict[str, Any] | None = None

    @property
    def last(self) -> int:
        """The number of the last entry."""
        return self.dropped + len(self.entries)

    def numbered(self) -> list[tuple[int, int, bytes | bytearray]]:
        """Number, channel and content of the entries."""
        first = self.dropped + 1
        return [(first + n, channel, data) for n, (channel, data) in enumerate(self.entries)]

    def restore(self, numbered: list[tuple[int, int, bytes]], result: dict[str, Any]) -> None:
        """Load the log of a run that ended in an earlier executor."""
        self.dropped = numbered[0][0] - 1 if numbered else 0
        self.entries = [(channel, data) for _, channel, data in numbered]
        self.result = result

    def write(self, channel: int, data: bytes) -> None:
        """Add output. It is sent soon together with what follows, or at once if there is much."""
        self._unsent += len(data)
        self._size += len(data)
        while data:
            tail = self._tails.get(channel)
            if tail is None or len(tail) >= frames.CHUNK:
                tail = self._tails[channel] = bytearray()
                self.entries.append((channel, tail))
            room = frames.CHUNK - len(tail)
            tail += data[:room]
            data = data[room:]
        self._drop_old()
        if self._unsent >= BATCH:
            self.send()
        elif self._send_timer is None and self.followers:
            self._send_timer = self._loop.after(self._wait(), self.send)

    def _wait(self) -> float:
        """Seconds to wait for more output."""
        if self._ring is not None:
            # Keys are echoed, and the echo must be visible at once.
            quiet = time.monotonic() - self._sent_at > QUIET_AFTER
            return LAZY_DELAY if quiet else RING_DELAY
        seconds = min(LAZY_DELAY * (1 + self.last / 256), MAX_BATCH_DELAY)
        if self.last > MANY_ENTRIES:
            seconds = min(1.0, seconds * self.last / MANY_ENTRIES)
        return seconds

    def add(self, channel: int, line: bytes) -> None:
        """Add a line of JSON and send it at once."""
        line += b"\n"
        self._size += len(line)
        for start in range(0, len(line), frames.CHUNK):
            self.entries.append((channel, line[start : start + frames.CHUNK]))
        self._drop_old()
        self.send()

    def _drop_old(self) -> None:
        while self._ring is not None and (
            (self._size > self._ring and len(self.entries) > 1) or len(self.entries) > RING_ENTRIES
        ):
            channel, data = self.entries.pop(0)
            self.dropped += 1
            self._size -= len(data)
            if self._tails.get(channel) is data:
                del self._tails[channel]

    # Followers

    def follow(self, follower: Follower) -> None:
        self.followers.append(follower)
        follower.stream.on_credit = lambda: self._send_to(follower)
        follower.stream.on_reset = lambda: self._leave(follower)
        if self.begun or self.result is not None:
            self.announce()
        self._send_to(follower)

    def _leave(self, follower: Follower) -> None:
        # A log may be large: a stream that has ended must not keep it in memory.
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
        """The log is complete: each follower receives the result after the last entry."""
        self.result = result
        self.announce()
        self.send()

    def send(self) -> None:
        self._unsent = 0
        self._sent_at = time.monotonic()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        for follower in self.followers[:]:
            self._send_to(follower)

    def _send_to(self, follower: Follower) -> None:
        stream = follower.stream
        # Entries of a ring that a slow follower has missed are lost.
        follower.sent = max(follower.sent, self.dropped)
        while follower.sent < self.last:
            index = follower.sent - self.dropped
            channel, data = self.entries[index]
            if stream.credit < len(data) + frames.OUTPUT_HEADER.size:
                return
            self.announce()
            if isinstance(data, bytearray):
                # From now on a follower may continue after this entry, so it must not grow.
                if self._tails.get(channel) is data:
                    del self._tails[channel]
                data = bytes(data)
                self.entries[index] = (channel, data)
            follower.sent += 1
            stream.send(frames.OUTPUT, frames.OUTPUT_HEADER.pack(follower.sent, channel) + data)
        if self.result is not None and follower in self.followers:
            self._leave(follower)
            stream.end(self.result)
