"""
Limits of a run's output, counted over all links that follow it.

The limits are the control plane's own. An executor that received them with the request and exceeds
them violates the protocol. Of a run that another process requested, perhaps with other settings,
the excess is dropped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from atoll.link.errors import ProtocolViolation
from atoll.protocol import frames
from atoll.protocol.limits import MAX_APPROVAL_BYTES

VALUE_MARGIN = 64 * 1024
"""Added to the limit of the value, because an error with its traceback may take its place."""
LINES_MARGIN = 2 * MAX_APPROVAL_BYTES
"""For questions and answers, which the limit of displays does not include."""
MAX_ENTRIES = 200_000
"""An executor collects output into entries; even a run of hours has fewer."""
ENTRIES_PER_SECOND = 1000
"""For terminals, which may be used without a time limit."""
SMALL_ENTRY = 4096
"""Bytes; larger entries of a terminal are limited by credit alone."""
CHANNELS = (frames.STDOUT, frames.STDERR, frames.VALUE, frames.APPROVAL, frames.DISPLAY)


@dataclass(frozen=True, slots=True)
class RunLimits:
    output: int
    """Bytes of stdout, and of stderr."""
    value: int
    results: int
    """Bytes of displays of a context."""
    artifacts: int
    terminal: bool = False
    """Whether output is kept in a ring, and has no total."""


class Intake:
    """The output of one run so far."""

    def __init__(self, limits: RunLimits, *, requested: bool) -> None:
        self.limits = limits
        self.requested = requested
        """Whether this process sent the limits to the executor."""
        lines = limits.results + LINES_MARGIN
        output = None if limits.terminal else limits.output
        self._most: dict[int, int | None] = {
            frames.STDOUT: output,
            frames.STDERR: output,
            frames.VALUE: limits.value + VALUE_MARGIN,
            frames.APPROVAL: lines,
            frames.DISPLAY: lines,
        }
        self._received = dict.fromkeys(CHANNELS, 0)
        self._sequence = 0
        self._entries = 0
        self._since = time.monotonic()

    @property
    def sequence(self) -> int:
        """Number of the last entry that was received, accepted or not."""
        return self._sequence

    def take(self, sequence: int, channel: int, data: bytes) -> bytes:
        """Count an entry; returns the part that is accepted."""
        if channel not in self._most:
            raise ProtocolViolation(f"The executor sent output on channel {channel}.")
        if not data or sequence <= self._sequence:
            raise ProtocolViolation("The executor sent output that is empty or out of order.")
        self._sequence = sequence
        if not (self.limits.terminal and len(data) >= SMALL_ENTRY):
            self._entries += 1
        if self._entries > MAX_ENTRIES:
            self._check_rate()
        most, received = self._most[channel], self._received[channel]
        self._received[channel] = received + len(data)
        if most is None or received + len(data) <= most:
            return data
        if self.requested:
            raise ProtocolViolation(f"The executor sent more than {most} bytes of output.")
        return data[: max(0, most - received)]

    def _check_rate(self) -> None:
        room = 0.0
        if self.limits.terminal:
            room = (time.monotonic() - self._since) * ENTRIES_PER_SECOND
        if self._entries > MAX_ENTRIES + room:
            raise ProtocolViolation("The executor sent output in too many pieces.")

    def size(self, channel: int, claimed: int) -> int:
        """
        The full size of an output. The executor's claim is used only if it had to drop some.
        """
        most, received = self._most[channel], self._received[channel]
        if most is not None and received < most:
            return received
        return max(received, claimed)
