"""
The journal: results that were not acknowledged, in two files beside the workspace.

A record is one write, made before any client learns of the result. The next executor with this
workspace reads all complete records. The files belong to the host: only PID 1 has their
descriptors, and their size does not count as the user's disk.

The files may be cut or damaged; records from the first invalid one on are ignored. If a result
cannot be written, that is logged once and the result stays in memory; no method raises an error.
Acknowledgements are not written, so a record may be found again after it was acknowledged. Nothing
is flushed to disk: the journal survives processes but not a power failure.
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
    """The id, the result and the log of a run."""

COMPACT_ABOVE = 32 * 1024 * 1024
"""Size from which on a file is rewritten, if half of it or more is acknowledged."""
EMPTY_ABOVE = 256 * 1024
"""Size from which on a file is emptied when everything in it is acknowledged."""

MAGIC = b"atoll\0j1"
HEADER = struct.Struct("!8sQ8s")  # magic, generation and its checksum
RECORD = struct.Struct("!I8s")  # length and checksum of what follows
HEAD = struct.Struct("!I")  # length of the JSON; the log's bytes come after it


def checksum(data: bytes) -> bytes:
    """
    SipHash, as the importer uses it: every interpreter has it. The module with CRC-32 needs a
    library that an image may lack. Python 3.11 changed it, and cannot read older files.
    """
    return _imp.source_hash(0x61746F6C6C, data)


class Journal:
    """Without descriptors it stores nothing."""

    def __init__(self, fds: Sequence[int] = ()) -> None:
        self._fds = list(fds)
        """The file in use, and the other."""
        self._generation = 1
        self._size = 0
        self._unacknowledged: dict[str, tuple[int, int]] = {}
        """Offset and length of the unacknowledged records."""
        self._warned = False

    def append(self, run_id: str, result: dict[str, Any], log: Sequence[Entry]) -> None:
        if not self._fds:
            return
        record = _encode(run_id, result, log)
        try:
            if self._size + len(record) > COMPACT_ABOVE:
                self._compact()
            if HEADER.size + self._size + len(record) > JOURNAL_FILE_SIZE:
                raise OSError("%d bytes are not acknowledged yet" % self._size)
            start = self._size or HEADER.size
            self._write(record if self._size else _header(self._generation) + record)
        except OSError as error:
            self._warn(error)
            return
        self._unacknowledged[run_id] = (start, len(record))

    def drop(self, run_id: str) -> None:
        """The result was acknowledged: no client will ask for it again."""
        if (
            self._unacknowledged.pop(run_id, None) is None
            or self._unacknowledged
            or self._size <= EMPTY_ABOVE
        ):
            return
        try:
            self._empty()
        except OSError as error:
            self._warn(error)

    def load(self) -> list[Ended]:
        """Read the files. To be called once, before anything is written."""
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
            # Invalid data must not stay before or after what is written from now on.
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
            self._unacknowledged[ended[0]] = (start, self._size - start)

    def _write(self, data: bytes) -> None:
        """Write completely, or leave nothing between two records."""
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

    def _compact(self) -> None:
        """Copy unacknowledged records to the other file; its header makes it the current one."""
        if not self._unacknowledged:
            self._empty()
        elif sum(length for _, length in self._unacknowledged.values()) * 2 <= self._size:
            self._move()

    def _move(self) -> None:
        old, new = self._fds
        moved, size = {}, HEADER.size
        os.ftruncate(new, 0)
        for run_id, (start, length) in self._unacknowledged.items():
            record = os.pread(old, length, start)
            if len(record) < length or os.pwrite(new, record, size) < length:
                raise OSError("a record could not be moved")
            moved[run_id] = (size, length)
            size += length
        header = _header(self._generation + 1)
        if os.pwrite(new, header, 0) < len(header):
            raise OSError("a header could not be written")
        self._fds, self._unacknowledged, self._size = [new, old], moved, size
        self._generation += 1
        os.ftruncate(old, 0)

    def _empty(self) -> None:
        os.ftruncate(self._fds[0], 0)
        self._size = 0

    def _give_up(self, error: OSError) -> None:
        """Stop writing: the file could not be restored to a valid state."""
        self._fds = []
        self._unacknowledged = {}
        self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            try:
                os.write(2, ("atoll: results are only in memory: %s\n" % error).encode())
            except OSError:
                pass  # The log may be on the same full disk.


def _header(generation: int) -> bytes:
    return HEADER.pack(MAGIC, generation, checksum(b"%d" % generation))


def _generation(data: bytes) -> int:
    """0 for an invalid file."""
    if len(data) < HEADER.size:
        return 0
    magic, generation, claimed = HEADER.unpack_from(data)
    right = magic == MAGIC and claimed == checksum(b"%d" % generation)
    # A larger number could not be incremented.
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
    """None for a record that `_encode` did not write, even if its checksum is valid."""
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
