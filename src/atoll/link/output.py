"""
What a run may send, counted over all links by which it is followed.

The limits are those that the control plane knows, never what the executor says. One that was sent
them with the request and exceeds them violates the protocol. Of a run that another process
requested, perhaps with other settings, the excess is dropped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from atoll.link.errors import ProtocolViolation
from atoll.protocol import frames
from atoll.protocol.limits import MAX_APPROVAL_BYTES

VALUE_MARGIN = 64 * 1024
"""What an error's traceback, which comes in place of a value, may have beyond its limit."""
LINES_MARGIN = 2 * MAX_APPROVAL_BYTES
"""Questions and answers, which the limit of displays does not count."""
MAX_ENTRIES = 200_000
"""An executor gathers output; a run of hours does not come near this."""
ENTRIES_PER_SECOND = 1000
"""Of a terminal, which may be used for as long as one likes."""
SMALL_ENTRY = 4096
"""Bytes. Larger entries of a terminal are bounded by credit alone: it may print for hours."""
CHANNELS = (frames.STDOUT, frames.STDERR, frames.VALUE, frames.APPROVAL, frames.DISPLAY)


@dataclass(frozen=True, slots=True)
class RunLimits:
    output: int
    """Bytes of stdout, and of stderr."""
    value: int
    results: int
    """Bytes of what a context shows."""
    artifacts: int
    terminal: bool = False
    """Whether output is kept in a ring, and has no total."""

    @classmethod
    def of(cls, request: dict[str, Any]) -> RunLimits:
        """Those that a `run` request has."""
        return cls(
            output=request["output_limit"],
            value=request["return_limit"],
            results=request.get("results_limit", 0),
            artifacts=request["artifact_limit"],
            terminal=request.get("terminal") is not None,
        )


class Intake:
    """What has come of one attempt."""

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
        """Number of the last entry that came, taken or not."""
        return self._sequence

    def take(self, sequence: int, channel: int, data: bytes) -> bytes:
        """What of an entry is taken: all of it, unless the executor had other limits."""
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
        The full size of an output. What the executor claims counts only where it had to drop some.
        """
        most, received = self._most[channel], self._received[channel]
        if most is not None and received < most:
            return received
        return max(received, claimed)
