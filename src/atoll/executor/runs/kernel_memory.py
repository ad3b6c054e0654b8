"""
Memory that the kernel holds for user code and that no process's resident size includes.

Buffers of sockets, memory files that only a descriptor refers to, pipes, System V segments,
messages and semaphores, page tables. All values come from the kernel. A measurement does a bounded
amount of work, and raises `TooMany` if there is more to measure.
"""

from __future__ import annotations

import _socket
import os
import struct

from .. import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable, Iterator

MAX_SOCKETS = 32_768
MAX_DESCRIPTORS = 32_768
"""Sockets, and descriptors, of an instance that one measurement counts."""
MAX_SMAPS = 4 << 20
"""Bytes of /proc/PID/smaps that one measurement reads."""

SOCKET_MEMORY = 4096
"""A socket with empty buffers: its structure, its inode and its file."""
PIPE_MEMORY = 8192
"""A pipe beyond the pages that each user may have (`fs.pipe-user-pages-soft`)."""
MEMFD = "/memfd:"
DELETED = " (deleted)"
PIPE = "pipe:"

_UNIX, _INET, _NETLINK, _INET6 = 1, 2, 16, 10
_TCP, _UDP = 6, 17
_NETLINK_SOCK_DIAG, _SOCK_RAW, _SOCK_CLOEXEC = 4, 3, 0o2000000
_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_INET_REQUEST = struct.Struct("=BBBxI48x")
_INET_MEMINFO, _INET_BODY = 7, 72
_UNIX_REQUEST = struct.Struct("=BBxxIIII4x")
_UNIX_STATES = 0xFFFF_FFFF
_UNIX_SHOW_QUEUE, _UNIX_SHOW_MEMORY = 0x10, 0x20
_UNIX_QUEUE, _UNIX_MEMINFO, _UNIX_SHUTDOWN, _UNIX_BODY = 4, 5, 6, 16
_DATAGRAM, _SEQPACKET = 2, 5
_MEMINFO = struct.Struct("=8I")
_ATTRIBUTE = struct.Struct("=HH")
_CLOSED_PEER, _LISTENING = 3, 10

_IPC_RMID = 0
_SHM_INFO, _MSG_INFO, _SEM_INFO = 14, 12, 19
# Unlike the older commands, these also report objects that their owner cannot read.
_SHM_STAT_ANY, _MSG_STAT_ANY, _SEM_STAT_ANY = 15, 13, 20
_SHM_STRUCT = struct.Struct("i4x5L")
_MSG_STRUCT = struct.Struct("7iH2x")
_SEM_STRUCT = struct.Struct("10i")
MESSAGE_MEMORY, SEMAPHORE_MEMORY = 64, 64
"""A message without its text, and a semaphore."""


class TooMany(Exception):
    """More objects exist than one measurement counts."""


class Descriptors:
    """
    What the descriptors of user code refer to, counted once: memory files, pipes, and files beneath
    `root` that have no name any more.
    """

    def __init__(self, root: str) -> None:
        self._count = 0
        self._beneath = root + "/"
        self._unnamed: dict[tuple[int, int], int] = {}
        self._pipes: set[str] = set()
        self.files: dict[tuple[int, int], int] = {}
        """Bytes of memory files, by device and inode."""
        self.closed: list[int] = []
        """Processes whose descriptors cannot be read."""

    def add(self, pid: int) -> None:
        place = "/proc/%d/fd" % pid
        try:
            names = os.listdir(place)
        except PermissionError:
            self.closed.append(pid)
            return
        except OSError:
            return  # It has ended.
        self._count += len(names)
        if self._count > MAX_DESCRIPTORS:
            raise TooMany
        for name in names:
            path = "%s/%s" % (place, name)
            try:
                # `stat` comes later: a file system that does not answer would block it.
                target = os.readlink(path)
                if target.startswith(PIPE):
                    self._pipes.add(target)
                elif target.startswith(MEMFD):
                    status = os.stat(path)
                    self.files[status.st_dev, status.st_ino] = status.st_blocks * 512
                elif target.endswith(DELETED) and target.startswith(self._beneath):
                    status = os.stat(path)
                    if status.st_nlink == 0:
                        self._unnamed[status.st_dev, status.st_ino] = status.st_blocks * 512
            except OSError:
                continue  # Closed meanwhile.

    @property
    def memory(self) -> int:
        return sum(self.files.values()) + len(self._pipes) * PIPE_MEMORY

    @property
    def disk(self) -> int:
        """Bytes of files on disk that only a descriptor refers to."""
        return sum(self._unnamed.values())


class Mappings:
    """Shared memory that only mappings of processes refer to."""

    def __init__(self, files: Iterable[tuple[int, int]], places: Iterable[int]) -> None:
        """
        Leaves out `files` and everything on the devices `places`, which are counted elsewhere.
        """
        self._files = frozenset(files)
        self._places = frozenset(places)
        self._read = 0

    def shared(self, pid: int, most: int) -> int:
        """Bytes that a process has mapped, at most `most`; `most` if they cannot be read."""
        total = 0
        counts = False
        try:
            with open("/proc/%d/smaps" % pid, "rb") as file:
                for line in file:
                    self._read += len(line)
                    if self._read > MAX_SMAPS:
                        return most
                    name, _, rest = line.partition(b" ")
                    if not name.endswith(b":"):
                        counts = self._counts(line)
                    elif counts and name == b"Pss:":
                        total += int(rest.split()[0]) * 1024
        except (FileNotFoundError, ProcessLookupError):
            return 0
        except OSError:
            return most
        return min(total, most)

    def _counts(self, mapping: bytes) -> bool:
        fields = mapping.split(None, 5)
        if len(fields) < 6 or b"s" not in fields[1]:
            # Private to the process: `Pss_Anon` includes the pages that were written.
            return False
        major, _, minor = fields[3].partition(b":")
        device, inode = os.makedev(int(major, 16), int(minor, 16)), int(fields[4])
        if device in self._places or (device, inode) in self._files:
            return False
        path = fields[5]
        # Not System V segments, and not files of the disk, which the kernel can drop.
        return path.startswith((b"/memfd:", b"/dev/zero (deleted)"))


def page_tables(pid: int) -> int:
    """Bytes of a process's page tables."""
    try:
        with open("/proc/%d/status" % pid, "rb") as file:
            for line in file:
                if line.startswith(b"VmPTE:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # It has ended.
    return 0


def system_v() -> int:
    """Bytes of the instance's System V segments, attached or not, messages and semaphores."""
    segments = _ipc_info("shmctl", _SHM_INFO, _SHM_STRUCT)
    messages = _ipc_info("msgctl", _MSG_INFO, _MSG_STRUCT)
    semaphores = _ipc_info("semctl", _SEM_INFO, _SEM_STRUCT)
    return (
        (segments[2] + segments[3]) * os.sysconf("SC_PAGE_SIZE")
        + messages[6]
        + messages[1] * MESSAGE_MEMORY
        + semaphores[9] * SEMAPHORE_MEMORY
    )


def remove_system_v() -> None:
    """Remove all System V objects, which outlive the processes that made them."""
    for function, info, status in (
        ("shmctl", _SHM_INFO, _SHM_STAT_ANY),
        ("msgctl", _MSG_INFO, _MSG_STAT_ANY),
        ("semctl", _SEM_INFO, _SEM_STAT_ANY),
    ):
        highest, _ = syscalls.ipc_control(function, 0, info)
        for index in range(highest + 1):
            number, _ = syscalls.ipc_control(function, index, status)
            if number >= 0:
                syscalls.ipc_control(function, number, _IPC_RMID)


def _ipc_info(function: str, command: int, layout: struct.Struct) -> tuple[int, ...]:
    done, report = syscalls.ipc_control(function, 0, command)
    if done < 0:
        raise OSError("%s failed" % function)
    return layout.unpack(report[: layout.size])


def network_sockets() -> int:
    """Bytes in the buffers of this network namespace's TCP, UDP and netlink sockets."""
    total = _netlink()
    found = 0
    for family, file in ((_INET, "sockstat"), (_INET6, "sockstat6")):
        for protocol in _in_use(file):
            request = _INET_REQUEST.pack(family, protocol, 1 << (_INET_MEMINFO - 1), 0xFFFF_FFFF)
            for body in _dump(request):
                found += 1
                if found > MAX_SOCKETS:
                    raise TooMany
                for kind, value in _attributes(body, _INET_BODY):
                    if kind == _INET_MEMINFO:
                        received, _, sent, _, forward, queued, options, backlog = _MEMINFO.unpack(
                            value[: _MEMINFO.size]
                        )
                        total += received + max(sent, queued) + forward + options + backlog
    return total + found * SOCKET_MEMORY


def unix_sockets() -> int:
    """
    Bytes in the buffers of this network namespace's unix sockets. Queued data is charged to its
    sender; for a closed sender the most that it could have sent is counted.
    """
    total = found = 0
    show = _UNIX_SHOW_QUEUE | _UNIX_SHOW_MEMORY
    for body in _dump(_UNIX_REQUEST.pack(_UNIX, 0, _UNIX_STATES, 0, show, 0)):
        found += 1
        if found > MAX_SOCKETS:
            raise TooMany
        kind = body[1]
        waiting = largest = 0
        closed = False
        for name, value in _attributes(body, _UNIX_BODY):
            if name == _UNIX_MEMINFO:
                memory = _MEMINFO.unpack(value[: _MEMINFO.size])
                total += memory[2]
                largest = memory[3]
            elif name == _UNIX_QUEUE:
                waiting = struct.unpack_from("=I", value)[0]
            elif name == _UNIX_SHUTDOWN:
                closed = value[0] == _CLOSED_PEER
        if body[2] == _LISTENING:
            # Connections that wait to be accepted are not listed; their senders may be closed.
            total += largest * waiting
        elif kind == _DATAGRAM:
            # The kernel reports only the first message; senders of others may be gone.
            total += largest * (_datagrams() + 1)
        elif closed and (waiting or kind == _SEQPACKET):
            total += max(largest, waiting)
    return total + found * SOCKET_MEMORY


def _datagrams() -> int:
    """Messages that a unix datagram socket queues."""
    with open("/proc/sys/net/unix/max_dgram_qlen", "rb") as file:
        return int(file.read())


def _in_use(name: str) -> list[int]:
    """Protocols of an address family that this namespace has sockets of."""
    try:
        with open("/proc/net/%s" % name, "rb") as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []  # The kernel has no IPv6.
    protocols = {b"TCP:": _TCP, b"TCP6:": _TCP, b"UDP:": _UDP, b"UDP6:": _UDP}
    found = []
    for line in lines:
        words = line.split()
        # Orphaned sockets are not in use, but their buffers may be full.
        if words and words[0] in protocols and any(count != b"0" for count in words[2:5:2]):
            found.append(protocols[words[0]])
    return found


def _netlink() -> int:
    total = found = 0
    with open("/proc/net/netlink", "rb") as file:
        next(file)
        for line in file:
            found += 1
            if found > MAX_SOCKETS:
                raise TooMany
            fields = line.split()
            total += int(fields[4]) + int(fields[5]) + SOCKET_MEMORY
    return total


def _dump(request: bytes) -> Iterator[bytes]:
    """The kernel's answers to a sock_diag request."""
    asked = _socket.socket(_NETLINK, _SOCK_RAW | _SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
    try:
        size = _HEADER.size + len(request)
        asked.send(_HEADER.pack(size, _DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
        while True:
            data = asked.recv(65_536)
            position = 0
            while position + _HEADER.size <= len(data):
                length, kind = _HEADER.unpack_from(data, position)[:2]
                if kind == _DONE:
                    return
                body = data[position + _HEADER.size : position + length]
                if kind == _ERROR:
                    number = -struct.unpack_from("=i", body)[0]
                    raise OSError(number, os.strerror(number))
                yield body
                position += (length + 3) & ~3
    finally:
        asked.close()


def _attributes(body: bytes, start: int) -> Iterator[tuple[int, bytes]]:
    position = start
    while position + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, position)
        if length < _ATTRIBUTE.size:
            return
        yield kind, body[position + _ATTRIBUTE.size : position + length]
        position += (length + 3) & ~3
