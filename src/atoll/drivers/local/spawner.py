"""
The process that starts instances: small, with one thread, and alive as long as they are.

It is a program of its own, run from this file and importing the standard library alone. A fork of
it is cheap however large the process is that Atoll is embedded in, and `bwrap --die-with-parent`,
which follows a thread, follows its only one.

When its owner ends, by SIGKILL too, it sees the socket close or the owner's pid go. It ends the
ephemeral instances. The others go on, for the next server of the data directory, and it stays with
them. If no server comes, it is the one to clean up: it removes the control groups of those that
end, and ends all of them when the data directory was removed or after `limit` seconds. Executors
do that themselves, and earlier (`executor/unattended.py`); a paused or hostile one does not.

As root it gives each instance a mount namespace in which the sources of its mounts are bound to
places that an unprivileged uid can reach, mounts the workspace's image there, and becomes that uid
before it starts bubblewrap. All of that goes away with the instance, without anybody cleaning up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from atoll.drivers.shared.bounded_log import create_log, read_log_tail
from atoll.drivers.shared.mount_calls import (
    MNT_DETACH,
    MS_BIND,
    MS_NOATIME,
    MS_NODEV,
    MS_NOSUID,
    MS_RDONLY,
    MS_REC,
    check,
    libc,
    mount,
    mount_image,
    mount_mapped,
    own_mounts,
    unescaped,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MESSAGE = 256 * 1024


ROOT = "root"
"""In the stage: the root file system of a template with layers."""

OWNER = "ATOLL_OWNER"
"""Environment variable of bubblewraps: the data directory that the instance belongs to."""

LISTEN_FD, SECCOMP_FD, INFO_FD = 3, 4, 5
JOURNAL_FDS = (6, 7)
CALLBACK_FD = 8
JOURNAL_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


SUPERVISOR_GROUP = "supervisor"
"""In version 2, the control group below an instance's that its supervisor is in."""
START_SECONDS = 10.0
"""The longest that bubblewrap may take to start its child once the owner is gone."""
ORPHAN_LOOK = 15.0
"""Seconds between two looks for a server, by a spawner whose owner has ended."""


def _let_go(directory: str) -> None:
    """
    Unmount, in this namespace alone, what is mounted beneath the directory: an instance would keep
    what belongs to others from being unmounted as long as it lives.
    """
    prefix = os.fsencode(directory) + b"/"
    with open("/proc/self/mountinfo", "rb") as file:
        found = [unescaped(line.split()[4]) for line in file]
    for path in reversed(found):
        if path.startswith(prefix):
            check(libc.umount2(path, MNT_DETACH), f"unmounting {os.fsdecode(path)}")


def mount_stage(stage: str) -> None:
    """A place of this process alone, which any uid can reach."""
    own_mounts()
    mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")


def mount_layers(stage: str, directories: list[str]) -> None:
    """A root file system out of several directories, the highest first, read-only."""
    # By names of ours: a path may have colons and commas, and is as long as it likes.
    names = []
    for number, directory in enumerate(directories):
        names.append(os.path.join(stage, f"layer{number}"))
        os.mkdir(names[-1])
        mount(directory, names[-1], None, MS_BIND)
    target = os.path.join(stage, ROOT)
    os.mkdir(target)
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOATIME
    mount("overlay", target, "overlay", flags, f"lowerdir={':'.join(names)}")


def _prepare_mounts(request: dict[str, Any]) -> None:
    stage = request["stage"]
    mount_stage(stage)
    if request["layers"]:
        mount_layers(stage, request["layers"])
    for source, name in request["binds"]:
        target = os.path.join(stage, name)
        if os.path.isdir(source):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        mount(source, target, None, MS_BIND | MS_REC)
    _let_go(request["mounts"])
    if request["image"]:
        target = os.path.join(stage, "workspace")
        os.mkdir(target)
        if request.get("owner") is not None:
            mount_mapped(request["image"], target, request["owner"], request["uid"])
        else:
            mount_image(request["image"], target)
        if os.stat(target).st_uid != request["uid"]:
            os.chown(target, request["uid"], request["uid"])
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(target, "lost+found"))


def _become(request: dict[str, Any], fds: dict[int, int], owner: str) -> NoReturn:
    """In the forked child: everything up to bubblewrap itself."""
    for path in request["groups"]:
        with open(path, "w") as group:
            group.write("0")
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
    for name, most in request["rlimits"].items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY and os.geteuid() != 0:
            most = min(most, hard)
        resource.setrlimit(kind, (most, most))
    if request["stage"]:
        _prepare_mounts(request)
    null = os.open("/dev/null", os.O_RDWR)
    # Move all out of the way first: a target number may be another's source.
    moved = {target: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for target, fd in fds.items()}
    moved[0] = null
    for target, fd in moved.items():
        os.dup2(fd, target, inheritable=True)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.setsid()
    os.chdir("/")
    if request["uid"] is not None:
        os.setgroups([])
        os.setresgid(request["uid"], request["uid"], request["uid"])
        os.setresuid(request["uid"], request["uid"], request["uid"])
    # Of bubblewrap itself, which clears it for what it starts.
    env = {"PATH": "/usr/bin:/bin", OWNER: owner}
    os.execve(request["argv"][0], request["argv"], env)


def _open_log(path: str | None) -> int:
    """A named pipe that the owner reads; without a name, memory that is read when all is over."""
    if path is None:
        return create_log()
    # Without waiting: a reader that has not come yet is an error of the owner.
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(fd, True)
    return fd


@contextlib.contextmanager
def unserved(locks: list[str]) -> Iterator[bool]:
    """
    Whether no server holds one of these lock files. A server that starts waits until the block is
    left. A file that cannot be opened counts as held: nothing may be ended on a guess.
    """
    with contextlib.ExitStack() as held:
        for path in locks:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                yield False
                return
            held.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
        yield True


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _group_directories(join_files: list[str]) -> list[str]:
    """The directories of an instance's control groups; that of the instance itself is the last."""
    found: list[str] = []
    for path in join_files:
        top = os.path.dirname(path)
        if os.path.basename(top) == SUPERVISOR_GROUP:
            top = os.path.dirname(top)
        with contextlib.suppress(OSError):
            found += [entry.path for entry in os.scandir(top) if entry.is_dir()]
        found.append(top)
    return found


def _end(pid: int, request: dict[str, Any]) -> None:
    """End an instance, frozen or not: all of it ends with its PID 1."""
    child = request.get("child", 0)
    for process in (child if _parent(child) == pid else 0, pid):
        with contextlib.suppress(ProcessLookupError):
            if process:
                os.kill(process, signal.SIGKILL)
    for directory in _group_directories(request["groups"]):
        # In version 1 the frozen do not even end.
        with contextlib.suppress(OSError), open(f"{directory}/freezer.state", "r+") as state:
            state.write("THAWED")


def _has_groups(request: dict[str, Any]) -> bool:
    return any(os.path.isdir(path) for path in _group_directories(request["groups"]))


def _remove_groups(request: dict[str, Any]) -> bool:
    """Those of an instance that has ended; False while a process is in them."""
    for directory in _group_directories(request["groups"]):
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            pass
        except OSError:
            return False
        # That of all instances of the node, if this was the last one.
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(directory))
    return True


class Spawner:
    def __init__(self, control: socket.socket, owner: int, home: dict[str, Any]) -> None:
        """
        `home` tells whose instances these are: `directory`, the data directory, `locks`, the files
        that its servers hold, and `limit`, how long its instances may be without one, in seconds.
        """
        self._control = control
        self._home = home
        self._identity = _identity(home["directory"])
        self._poll = select.poll()
        self._starting: dict[int, tuple[int, int, bytearray]] = {}
        """
        Pipes of bubblewraps that have not yet told their child's pid: request number, pid, text.
        """
        self._running: dict[int, dict[str, Any]] = {}
        """Requests of the bubblewraps that have not ended, by pid."""
        self._logs: dict[int, int] = {}
        """By the pid of a bubblewrap, what it and its instance print, where that is kept here."""
        try:
            self._owner = os.pidfd_open(owner)
        except ProcessLookupError:
            sys.exit(0)  # It died before this began.

    def run(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for fd in (self._control.fileno(), self._owner, wake_read):
            self._poll.register(fd, select.POLLIN)
        self._serve(wake_read)
        self._outlive(wake_read)

    def _serve(self, wake_read: int) -> None:
        """Start instances until the owner ends."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._owner:
                    return
                if fd == wake_read:
                    os.read(wake_read, 4096)
                    self._reap()
                elif fd == self._control.fileno():
                    try:
                        message = self._control.recv(MESSAGE)
                    except ConnectionResetError:
                        return
                    if not message:
                        return
                    self._spawn(json.loads(message))
                elif fd in self._starting:
                    self._hear(fd)

    def _outlive(self, wake_read: int) -> None:
        """Stay with the instances until they end, or until there is no hope of a server."""
        deadline = time.monotonic() + START_SECONDS
        while self._starting:
            # Bubblewrap binds the life of its child to its own last: until then only its pid does.
            poll = select.poll()
            for fd in self._starting:
                poll.register(fd, select.POLLIN)
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                break
            for fd, _ in ready:
                self._hear(fd)
        for pid, request in self._running.items():
            if request["ephemeral"]:
                _end(pid, request)
        while any(request["ephemeral"] for request in self._running.values()):
            select.select([wake_read], [], [])
            os.read(wake_read, 4096)
            self._reap()
        if not self._running:
            return
        # An owner that waits for it knows by this that the ephemeral ones have ended.
        self._answer(outlives=True)
        self._control.close()
        ended: list[tuple[dict[str, Any], int]] = []
        alone_since: float | None = None
        while self._running or ended:
            pause = min(ORPHAN_LOOK, self._home["limit"] / 4)
            if select.select([wake_read], [], [], pause)[0]:
                os.read(wake_read, 4096)
            ended += self._reap()
            with unserved(self._home["locks"]) as alone:
                if not alone:
                    # The server that has the data directory removes what they leave.
                    alone_since = None
                    ended.clear()
                    continue
                now = time.monotonic()
                alone_since = now if alone_since is None else alone_since
                removed = _identity(self._home["directory"]) != self._identity
                hopeless = removed or now - alone_since > self._home["limit"]
                if hopeless:
                    for pid, request in self._running.items():
                        _end(pid, request)
                ended = [
                    (request, status)
                    for request, status in ended
                    # They would tell the next server that memory ran out.
                    if (status and not hopeless and _has_groups(request))
                    or not _remove_groups(request)
                ]

    def _answer(self, **answer: Any) -> None:
        if self._control.fileno() < 0:
            return  # The owner is gone.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(json.dumps(answer).encode())

    def _spawn(self, request: dict[str, Any]) -> None:
        try:
            pid, info = self._start(request)
        except OSError as error:
            self._answer(number=request["number"], error=str(error))
            return
        self._starting[info] = (request["number"], pid, bytearray())
        self._running[pid] = request
        self._poll.register(info, select.POLLIN)

    def _start(self, request: dict[str, Any]) -> tuple[int, int]:
        with contextlib.ExitStack() as held:
            listener = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            directory = os.open(request["directory"], os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, directory)
            # Through the descriptor: the whole path may be longer than a socket's name can be.
            place = f"/proc/self/fd/{directory}/link.sock"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(place)
            listener.bind(place)
            listener.listen(64)
            fds = {LISTEN_FD: listener.fileno()}
            if request["seccomp"]:
                fds[SECCOMP_FD] = os.open(request["seccomp"], os.O_RDONLY | os.O_CLOEXEC)
                held.callback(os.close, fds[SECCOMP_FD])
            for number, path in zip(JOURNAL_FDS, request["journal"], strict=False):
                fds[number] = os.open(path, JOURNAL_FLAGS, 0o600)
                held.callback(os.close, fds[number])
                if request["uid"] is not None:
                    os.fchown(fds[number], request["uid"], request["uid"])
            if request["callback"]:
                fds[CALLBACK_FD] = os.open(request["callback"], os.O_RDONLY | os.O_CLOEXEC)
                held.callback(os.close, fds[CALLBACK_FD])
            log = _open_log(request["log"])
            held.callback(os.close, log)
            fds[1] = fds[2] = log
            read, write = os.pipe2(os.O_CLOEXEC)
            fds[INFO_FD] = write
            held.callback(os.close, write)
            pid = os.fork()
            if pid == 0:
                try:
                    _become(request, fds, self._home["directory"])
                except BaseException as error:  # noqa: BLE001 - told to the owner; the process ends here
                    os.write(write, json.dumps({"error": str(error)}).encode())
                finally:
                    os._exit(127)
            if request["log"] is None:
                self._logs[pid] = fcntl.fcntl(log, fcntl.F_DUPFD_CLOEXEC, 0)
            return pid, read

    def _hear(self, fd: int) -> None:
        number, pid, text = self._starting[fd]
        data = os.read(fd, 4096)
        text += data
        try:
            info = json.loads(text)
        except ValueError:
            if data:
                return
            info = {"error": "bubblewrap ended before it started anything"}
        self._poll.unregister(fd)
        os.close(fd)
        del self._starting[fd]
        if "error" in info:
            self._answer(number=number, error=info["error"])
        else:
            if pid in self._running:
                self._running[pid]["child"] = info["child-pid"]
            self._answer(number=number, pid=pid, child=info["child-pid"])

    def _reap(self) -> list[tuple[dict[str, Any], int]]:
        """Requests of the instances that have ended, with their wait status."""
        ended: list[tuple[dict[str, Any], int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            ended.append((self._running.pop(pid), status))
            log, printed = self._logs.pop(pid, None), ""
            if log is not None:
                printed = read_log_tail(log)
                os.close(log)
            self._answer(exited=pid, status=status, printed=printed)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    Spawner(control, int(sys.argv[2]), json.loads(sys.argv[3])).run()
    # The owner waits for this end, and there is nothing that Python would have to clean up.
    os._exit(0)
