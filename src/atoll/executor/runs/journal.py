"""
Results that nobody has taken yet, kept in two files beside the workspace.

A record is one write, made before anybody is told the result; what was written whole is read whole
by whichever executor has the workspace next. The files are the host's: they were opened before the
sandbox was closed, PID 1 alone has the descriptors, and what they take is not the user's disk.

What is read may be anything, cut or damaged: the records before the first that is not whole count,
the rest does not. What cannot be written is said once and stays in memory alone; no error comes out
of here. Acknowledgements are not written, so a record may be found again after it was taken.
Nothing is forced to the disk: the journal outlives processes, not a power cut.
"""

from __future__ import annotations

import _imp
import os
import struct

from ...protocol import minijson
from ...protocol.limits import JOURNAL_FILE_SIZE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Sequence

    Entry = tuple[int, int, "bytes | bytearray"]
    Ended = tuple[str, dict[str, Any], list[tuple[int, int, bytes]]]
    """Id, result and log of a run."""

CROWDED = 32 * 1024 * 1024
"""A file beyond this is rewritten without what was taken, if that is half of it or more."""
IDLE = 256 * 1024
"""A file beyond this is emptied when nothing in it waits."""

MAGIC = b"atoll\0j1"
HEADER = struct.Struct("!8sQ8s")  # magic, generation and its checksum
RECORD = struct.Struct("!I8s")  # length and checksum of what follows
HEAD = struct.Struct("!I")  # length of the JSON; the log's bytes come after it


def checksum(data: bytes) -> bytes:
    """
    SipHash, as the importer uses it: in every interpreter, at no cost. The module with CRC-32 needs
    a library that an image may not have. Python 3.11 changed it, and reads nothing of before.
    """
    return _imp.source_hash(0x61746F6C6C, data)


class Journal:
    """Without descriptors nothing is kept, and nothing is found."""

    def __init__(self, fds: Sequence[int] = ()) -> None:
        self._fds = list(fds)
        """The file in use, and the other."""
        self._generation = 1
        self._size = 0
        self._waiting: dict[str, tuple[int, int]] = {}
        """Place and length of the records that were not taken."""
        self._complained = False

    def append(self, run_id: str, result: dict[str, Any], log: Sequence[Entry]) -> None:
        if not self._fds:
            return
        record = _encode(run_id, result, log)
        try:
            if self._size + len(record) > CROWDED:
                self._make_room()
            if HEADER.size + self._size + len(record) > JOURNAL_FILE_SIZE:
                raise OSError("%d bytes are waiting already" % self._size)
            start = self._size or HEADER.size
            self._write(record if self._size else _header(self._generation) + record)
        except OSError as error:
            self._complain(error)
            return
        self._waiting[run_id] = (start, len(record))

    def drop(self, run_id: str) -> None:
        """It was taken: nobody will ask for it again."""
        if self._waiting.pop(run_id, None) is None or self._waiting or self._size <= IDLE:
            return
        try:
            self._empty()
        except OSError as error:
            self._complain(error)

    def load(self) -> list[Ended]:
        """What is in the files; to be called once, before anything is written."""
        best: tuple[int, int, bytes] | None = None
        for place, fd in enumerate(self._fds):
            data = _read(fd)
            generation = _generation(data)
            if generation and (best is None or generation > best[0]):
                best = (generation, place, data)
        ended: list[Ended] = []
        try:
            if best is not None:
                self._generation, place, data = best
                self._fds.insert(0, self._fds.pop(place))
                ended = self._take_in(data)
            # What was not understood must not stand behind, or before, what is written now.
            for fd, size in zip(self._fds, (self._size, 0)):
                os.ftruncate(fd, size)
        except OSError as error:
            self._give_up(error)
        return ended

    def _take_in(self, data: bytes) -> list[Ended]:
        found: dict[str, Ended] = {}
        self._size = HEADER.size
        while True:
            start = self._size
            record = _record(data, start)
            ended = None if record is None else _decode(record)
            if record is None or ended is None:
                return list(found.values())
            self._size += RECORD.size + len(record)
            found[ended[0]] = ended
            self._waiting[ended[0]] = (start, self._size - start)

    def _write(self, data: bytes) -> None:
        """All of it, or nothing that would stand between two records."""
        try:
            written = os.pwrite(self._fds[0], data, self._size)
            if written < len(data):
                raise OSError("only %d of %d bytes could be written" % (written, len(data)))
        except OSError:
            try:
                os.ftruncate(self._fds[0], self._size)
            except OSError as error:
                self._give_up(error)
            raise
        self._size += len(data)

    def _make_room(self) -> None:
        """Without what was taken, in the other file, which counts when its header is there."""
        if not self._waiting:
            self._empty()
        elif sum(length for _, length in self._waiting.values()) * 2 <= self._size:
            self._move()

    def _move(self) -> None:
        old, new = self._fds
        moved, size = {}, HEADER.size
        os.ftruncate(new, 0)
        for run_id, (start, length) in self._waiting.items():
            record = os.pread(old, length, start)
            if len(record) < length or os.pwrite(new, record, size) < length:
                raise OSError("a record could not be moved")
            moved[run_id] = (size, length)
            size += length
        header = _header(self._generation + 1)
        if os.pwrite(new, header, 0) < len(header):
            raise OSError("a header could not be written")
        self._fds, self._waiting, self._size = [new, old], moved, size
        self._generation += 1
        os.ftruncate(old, 0)

    def _empty(self) -> None:
        os.ftruncate(self._fds[0], 0)
        self._size = 0

    def _give_up(self, error: OSError) -> None:
        """A file that cannot be brought back into order is not written to any more."""
        self._fds = []
        self._waiting = {}
        self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            try:
                os.write(2, ("atoll: a result is in memory alone: %s\n" % error).encode())
            except OSError:
                pass  # The log may be on the same full disk.


def _header(generation: int) -> bytes:
    return HEADER.pack(MAGIC, generation, checksum(b"%d" % generation))


def _generation(data: bytes) -> int:
    """0 of what is no journal, or not a whole one."""
    if len(data) < HEADER.size:
        return 0
    magic, generation, claimed = HEADER.unpack_from(data)
    right = magic == MAGIC and claimed == checksum(b"%d" % generation)
    # One that could not be counted on from would be the last.
    return int(generation) if right and generation < 1 << 63 else 0


def _read(fd: int) -> bytes:
    try:
        size = min(os.fstat(fd).st_size, JOURNAL_FILE_SIZE)
        pieces = []
        place = 0
        while place < size:
            piece = os.pread(fd, min(size - place, 1 << 20), place)
            if not piece:
                break
            pieces.append(piece)
            place += len(piece)
        return b"".join(pieces)
    except OSError:
        return b""


def _record(data: bytes, place: int) -> bytes | None:
    if len(data) - place < RECORD.size:
        return None
    length, claimed = RECORD.unpack_from(data, place)
    place += RECORD.size
    if length > len(data) - place:
        return None
    record = data[place : place + length]
    return record if checksum(record) == claimed else None


def _encode(run_id: str, result: dict[str, Any], log: Sequence[Entry]) -> bytes:
    entries = [(sequence, channel, len(data)) for sequence, channel, data in log]
    head = minijson.dumps({"id": run_id, "result": result, "log": entries})
    body = b"".join((HEAD.pack(len(head)), head, *[data for _, _, data in log]))
    return RECORD.pack(len(body), checksum(body)) + body


def _decode(record: bytes) -> Ended | None:
    """None of what was not written by `_encode`, however well its checksum fits."""
    try:
        (length,) = HEAD.unpack_from(record)
        place = HEAD.size + length
        head = minijson.loads(record[HEAD.size : place])
        run_id, result, log = head["id"], head["result"], []
        if not isinstance(run_id, str) or not isinstance(result, dict):
            return None
        for sequence, channel, size in head["log"]:
            data = record[place : place + size]
            if size < 0 or len(data) != size:
                return None
            log.append((int(sequence), int(channel), data))
            place += size
    except (struct.error, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return run_id, result, log
