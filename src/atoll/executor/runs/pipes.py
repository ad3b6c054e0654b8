"""
Pipes between the supervisor and the process of a run: stdin, stdout, stderr, and the return value.
With a terminal, one pair of descriptors carries the first three.

Output is read as it comes, stored in the run's log up to a limit and only counted beyond it, so no
slow client slows the code down. Input that the code has not read waits here, up to `MAX_STDIN`.
"""

from __future__ import annotations

import os

from ...protocol import frames
from ..event_loop import READ, WRITE, Loop
from . import terminal
from .log import Log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

PIPE_READ = 262_144
MAX_READS = 64
"""Reads in a row from one pipe: a process that never stops writing must not block the loop."""
MAX_STDIN = 1024 * 1024
"""Bytes of unread input beyond which more is refused."""
MAX_ORPHANED = 256
OUTPUTS = (frames.STDOUT, frames.STDERR, frames.VALUE)


class Pipe:
    """One output of a run: stored up to a limit, counted beyond it."""

    def __init__(self, channel: int, fd: int, limit: int | None) -> None:
        self.channel = channel
        self.fd = fd
        self.limit = limit
        self.size = 0
        self.kept = 0


class OrphanedOutputs:
    """
    Outputs of ended runs to which background processes may still write. They are read and
    discarded. User code can keep them open for ever, so the oldest is closed when there are too
    many.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._fds: list[int] = []

    def add(self, fd: int) -> None:
        self._loop.add(fd, READ, lambda mask: self._drain(fd))
        self._fds.append(fd)
        if len(self._fds) > MAX_ORPHANED:
            self._close(self._fds[0])

    def _drain(self, fd: int) -> None:
        try:
            data = os.read(fd, PIPE_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(fd)

    def _close(self, fd: int) -> None:
        self._fds.remove(fd)
        self._loop.remove(fd)
        os.close(fd)


class Pipes:
    def __init__(self, loop: Loop, log: Log, request: dict[str, Any]) -> None:
        self._loop = loop
        self._log = log
        self._request = request
        self._outputs: list[Pipe] = []
        self._input = bytearray((request.get("stdin") or "").encode("utf-8", "surrogateescape"))
        """All input until a process takes the run: it may have to be written again."""
        self._input_open = bool(request.get("stdin_open")) or request.get("terminal") is not None
        self._taken = False
        self._stdin = bytearray()
        """Input that is still to be written."""
        self._stdin_fd = -1
        self._stdin_open = False
        """Whether more input may come."""
        self._feeding = False
        """Whether the loop waits until stdin is writable."""
        self._watched = False

    def open(self, null: int) -> list[int]:
        """Make the pipes. Returns the ends for the process; the caller closes them."""
        request = self._request
        theirs: list[int] = []
        text, size = request.get("stdin"), request.get("terminal")
        self._stdin, self._stdin_open = bytearray(self._input), self._input_open
        try:
            if size is not None:
                ours, slave = terminal.open(*size)
                theirs += [slave, os.dup(slave), os.dup(slave)]
                self._stdin_fd = os.dup(ours)
                # Limited by the log alone.
                self._outputs.append(Pipe(frames.STDOUT, ours, None))
            elif text is None and not request.get("stdin_open"):
                theirs.append(os.dup(null))
            else:
                read, self._stdin_fd = os.pipe2(os.O_CLOEXEC)
                theirs.append(read)
            for channel in OUTPUTS[len(theirs) - 1 :]:
                read, write = os.pipe2(os.O_CLOEXEC)
                theirs.append(write)
                limit: int = request["output_limit"]
                if channel == frames.VALUE:
                    limit = request["return_limit"] + 65_536
                self._outputs.append(Pipe(channel, read, limit))
            for fd in (self._stdin_fd, *(pipe.fd for pipe in self._outputs)):
                if fd >= 0:
                    os.set_blocking(fd, False)
        except BaseException:
            for fd in theirs:
                os.close(fd)
            self.close()
            raise
        return theirs

    @property
    def abandoned(self) -> bool:
        """
        Whether, since `watch`, every copy of the other ends was closed. The last pipe, for the
        value, represents all of them until a process takes the run.
        """
        return bool(self._outputs) and self._outputs[-1].fd < 0

    def taken(self) -> None:
        """Record that a process has the other ends, so that they are not opened again."""
        self._taken = True
        self._input.clear()

    def watch(self) -> None:
        """Start to read output and write input on the event loop."""
        self._watched = True
        for pipe in self._outputs:
            if pipe.fd >= 0:
                self._loop.add(pipe.fd, READ, self._reader(pipe))
        self.feed()

    # Output

    def _reader(self, pipe: Pipe) -> Callable[[int], None]:
        def ready(mask: int) -> None:
            self._read(pipe)

        return ready

    def _read(self, pipe: Pipe) -> bool:
        """Read once; returns whether there may be more."""
        try:
            data = os.read(pipe.fd, PIPE_READ)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close(pipe)
            return False
        pipe.size += len(data)
        kept = data if pipe.limit is None else data[: max(0, pipe.limit - pipe.kept)]
        if kept:
            pipe.kept += len(kept)
            self._log.write(pipe.channel, kept)
        return True

    def take(self) -> None:
        """Read what has been written so far."""
        for pipe in self._outputs:
            rounds = 0
            while pipe.fd >= 0 and rounds < MAX_READS and self._read(pipe):
                rounds += 1

    def sizes(self) -> dict[str, int]:
        """Bytes that were written, by channel."""
        return {str(pipe.channel): pipe.size for pipe in self._outputs}

    # Input

    def write_stdin(self, data: bytes, eof: bool) -> str | None:
        """Add input. Returns an error code if it cannot be accepted."""
        if self._stdin_fd < 0 or not self._stdin_open:
            return "stdin_closed"
        if len(self._stdin) + len(data) > MAX_STDIN:
            return "stdin_full"
        if eof and self._request.get("terminal") is not None:
            data += terminal.END_OF_INPUT
        elif eof:
            self._stdin_open = self._input_open = False
        self._stdin += data
        if not self._taken:
            self._input += data
        self.feed()
        return None

    def feed(self) -> None:
        """Write input as far as possible; close stdin at its end, or when no process reads it."""
        if self._stdin_fd < 0:
            return
        try:
            while self._stdin:
                del self._stdin[: os.write(self._stdin_fd, self._stdin[:65_536])]
        except BlockingIOError:
            if self._watched and not self._feeding:
                self._feeding = True
                self._loop.add(self._stdin_fd, WRITE, lambda mask: self.feed())
            return
        except OSError:
            self._stdin_open = False
        if not self._stdin_open:
            self._close_stdin()
        elif self._feeding:
            self._feeding = False
            self._loop.remove(self._stdin_fd)

    def _close_stdin(self) -> None:
        self._stdin.clear()
        if self._stdin_fd >= 0:
            self._loop.remove(self._stdin_fd)
            os.close(self._stdin_fd)
            self._stdin_fd, self._feeding = -1, False

    # The terminal

    @property
    def terminal_fd(self) -> int:
        """The supervisor's end of the terminal; -1 if there is none."""
        if self._request.get("terminal") is None or not self._outputs:
            return -1
        return self._outputs[0].fd

    # The end

    def settle(self, orphaned: OrphanedOutputs | None) -> None:
        """The run has its result; outputs with other writers go to `orphaned`."""
        for pipe in self._outputs:
            if pipe.fd >= 0 and orphaned is not None and pipe.channel != frames.VALUE:
                self._loop.remove(pipe.fd)
                orphaned.add(pipe.fd)
                pipe.fd = -1
        self.close()

    def close(self) -> None:
        """Close all of them; `open` makes new ones."""
        self._close_stdin()
        for pipe in self._outputs:
            if pipe.fd >= 0:
                self._close(pipe)
        self._outputs = []
        self._watched = False

    def _close(self, pipe: Pipe) -> None:
        self._loop.remove(pipe.fd)
        os.close(pipe.fd)
        pipe.fd = -1
