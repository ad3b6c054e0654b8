"""
What instances are shown of places that are not their own: volumes, and workspaces in the bucket.

A place is mounted once on the node, when the first instance needs it, and unmounted after the last.
Who needs it is written in the instances' directories, so it is the same for all control planes of
the node and known after a restart. A mount that does not answer any more, because its s3fs died for
one, is replaced by the next instance that needs it; instances that had it keep the dead one.

Nothing here looks into a place, whose names are a tenant's: only its top directory is touched, and
by a thread that is given up when it takes too long. Nothing is ever removed recursively where a
place may be mounted. Blocking; callers use a thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import threading
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from atoll.drivers.base import NotEmptied
from atoll.drivers.shared import bounded_log, mount_calls, processes
from atoll.drivers.shared.disk_images import (
    loop_device_of,
    make_file_system,
    mount_program,
    repair_image,
)
from atoll.drivers.shared.mount_points import mount_points, unmount
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Iterator
    from datetime import timedelta
    from pathlib import Path

    from atoll.drivers.shared.volumes.bucket_mounts import BucketMounts

LOCKS = 64
POLL_SECONDS = 0.01
ENDING = ((0.5, signal.SIGTERM), (10.0, signal.SIGKILL), (10.0, signal.SIGKILL))
"""Seconds for an s3fs that is not needed any more to end by itself, and what it gets then."""
STATE = "mount.json"
"""In the directory of a mount by s3fs: its process."""
USED = "mounts.json"
"""In an instance's directory: names of the places that it has."""
MAP_SECONDS = 30.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Mount:
    name: str
    """Of its mount, on this node."""
    image: Path | None = None
    """A file system image; or else"""
    view: Path | None = None
    """a directory, to be shown read-only, without devices and setuid; or else"""
    prefix: str | None = None
    """what of the bucket is mounted."""
    uid: int | None = None
    """Owner of an image's top directory; of the bucket, who alone can use it. Null: everybody."""
    owner: int | None = None
    """In an image, the uid that its files have on disk; null when that is `uid`."""


class NodeMounts:
    def __init__(
        self, root: Path, instances: Path, buckets: BucketMounts, timeout: timedelta
    ) -> None:
        self._root = root
        self._instances = instances
        self._buckets = buckets
        self._timeout = timeout.total_seconds()
        self._scratch_size: int | None = None
        self._started: list[subprocess.Popen[bytes]] = []

    def open(self, scratch_size: int | None) -> None:
        """
        Clear away what no instance has any more. `scratch_size` is in bytes; none where there can
        be no images.
        """
        self._scratch_size = scratch_size
        self._root.mkdir(mode=0o700, exist_ok=True)
        self.release(entry.name for entry in os.scandir(self._root) if entry.is_dir())

    def path(self, name: str) -> Path:
        return self._root / name / "files"

    def note(self, instance_id: str, names: list[str]) -> None:
        """Before they are mounted: from now on nobody takes them away from it."""
        (self._instances / instance_id / USED).write_text(json.dumps(names))

    def noted(self, instance_id: str) -> list[str]:
        try:
            found: list[str] = json.loads((self._instances / instance_id / USED).read_text())
        except (FileNotFoundError, ValueError):
            return []
        return found

    def is_of_bucket(self, name: str) -> bool:
        return (self._root / name / STATE).exists()

    def ensure(self, place: Mount) -> None:
        """Mounted and answering; an instance must have noted it."""
        with self._locked(place.name):
            if self._mounted(place.name) and self._answers(place.name):
                return
            self._unmount(place.name)
            try:
                self._mount(place)
            except BaseException:
                self._unmount(place.name)
                raise

    def sync(self, place: Mount) -> None:
        """
        Have the kernel write all that it holds of a file system. Another mount namespace may have a
        copy of a mount that is gone here, and keeps the file system alive.
        """
        self.ensure(place)
        try:
            fd = os.open(self.path(place.name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                processes.sync_file_system(fd)
            finally:
                os.close(fd)
        finally:
            self.release([place.name])

    def release(self, names: Iterable[str]) -> None:
        """Unmount those that no instance has."""
        for name in names:
            with self._locked(name):
                if not self.in_use(name):
                    self._unmount(name)

    def in_use(self, name: str) -> bool:
        return any(name in self.noted(entry) for entry in os.listdir(self._instances))

    def broken(self) -> list[str]:
        """
        Ids of instances that have a place which does not answer: only another one gets it. Its s3fs
        is ended, because a process that has a file open there cannot be before.
        """
        found: dict[str, list[str]] = {}
        if not self._root.is_dir():
            return []
        for entry in os.scandir(self._instances):
            for name in self.noted(entry.name):
                # A file system of this machine's own disk always answers.
                if self.is_of_bucket(name):
                    found.setdefault(name, []).append(entry.name)
        result: list[str] = []
        for name, instances in found.items():
            with self._locked(name):  # Who is mounting it right now is waited for.
                if self._mounted(name) and not self._answers(name):
                    self._kill(self._root / name)
                    result += [each for each in instances if name in self.noted(each)]
        return result

    def make_prefix(self, prefix: str) -> None:
        """So that it can be mounted: some versions of s3fs do not mount what is not there."""
        with self._whole_bucket() as root:
            self._bounded(lambda: self._buckets.directory(prefix, root).mkdir(0o755, True, True))

    def remove_prefix(self, prefix: str) -> None:
        """All that is beneath it, by way of a mount of it alone."""
        # An S3 server that was away for a moment fails once, and one that is away no mount.
        failure = self._emptied(prefix) and self._emptied(prefix)
        with self._whole_bucket() as root, contextlib.suppress(FileNotFoundError):
            try:
                self._bounded(self._buckets.directory(prefix, root).rmdir)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                if failure is not None and failure.errno != errno.EIO:
                    raise failure from None  # The s3fs has ended, say: that passes.
                # S3 lists names in XML, which has no control characters; and objects that others
                # wrote may have names that no file can have.
                raise NotEmptied(
                    f"{prefix} has objects left whose names cannot be listed. Remove them with a "
                    "tool of the S3 server, and try again."
                ) from None

    def _emptied(self, prefix: str) -> OSError | None:
        """The error when s3fs could not list or remove something."""
        name = f"empty-{os.getpid()}-{threading.get_ident()}"
        with self._locked(name):
            try:
                self._mount(Mount(name, prefix=prefix))
                try:
                    _empty(self.path(name))
                except OSError as error:
                    log.info("prefix.not_emptied", prefix=prefix, error=str(error))
                    return error
                return None
            finally:
                self._unmount(name)

    # One place

    @contextlib.contextmanager
    def _whole_bucket(self) -> Iterator[Path]:
        name = f"bucket-{os.getpid()}-{threading.get_ident()}"
        with self._locked(name):
            try:
                self._mount(Mount(name))
                yield self.path(name)
            finally:
                self._unmount(name)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """By one thread of one process at a time. A few locks for all: a file is never removed."""
        number = zlib.crc32(name.encode()) % LOCKS
        fd = os.open(self._root / f"lock-{number:02}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _mount(self, place: Mount) -> None:
        top = self._root / place.name
        for directory in (top, top / "files", top / "scratch"):
            directory.mkdir(mode=0o700, exist_ok=True)
        if place.image is not None:
            _mount_image(place.image, top / "files")
            if place.uid is not None:
                _hand_over(top / "files", place.uid, place.owner)
            return
        if place.view is not None:
            mount_calls.mount_view(str(place.view), str(top / "files"))
            return
        trouble = self._buckets.trouble()
        if trouble is not None:
            raise TemporaryError(f"{place.name}: {trouble}.", code="volume_unavailable")
        if self._scratch_size is not None:
            image = top / "scratch.image"
            make_file_system(image, self._scratch_size)
            mount_calls.mount_image(str(image), str(top / "scratch"))
            image.unlink()  # It is there as long as it is mounted, and nobody has to remove it.
        output = bounded_log.create_log()
        try:
            process = self._buckets.start(
                place.prefix, top, output, place.uid, bounded=self._scratch_size is not None
            )
            self._started = [known for known in self._started if known.poll() is None] + [process]
            state = {"pid": process.pid, "started": processes.start_time(process.pid)}
            (top / STATE).write_text(json.dumps(state))
            self._await(place.name, process, output)
        finally:
            os.close(output)

    def _await(self, name: str, process: subprocess.Popen[bytes], output: int) -> None:
        deadline = time.monotonic() + self._timeout
        while process.poll() is None and time.monotonic() < deadline:
            if self._mounted(name):
                # It is there before s3fs has seen whether it can be used.
                if self._answers(name) and process.poll() is None:
                    return
                break
            time.sleep(POLL_SECONDS)
        log.warning("mount.failed", name=name, said=bounded_log.read_log_tail(output))
        raise TemporaryError(
            f"{name} could not be mounted: the blob store does not answer, or refuses. What s3fs "
            "said is in the server's log.",
            code="volume_unavailable",
            retry_after=5.0,
        )

    def _mounted(self, name: str) -> bool:
        return str(self.path(name)) in mount_points(self._root)

    def _answers(self, name: str) -> bool:
        try:
            self._bounded(self.path(name).stat)
        except (OSError, TemporaryError):
            return False
        return True

    def _bounded(self, work: Callable[[], object]) -> None:
        """Do it in a thread that nobody waits for longer than the time-out."""
        result: list[BaseException | None] = []

        def run() -> None:
            try:
                work()
                result.append(None)
            except OSError as error:
                result.append(error)

        thread = threading.Thread(target=run, daemon=True, name="mount probe")
        thread.start()
        thread.join(self._timeout)
        if not result:
            raise TemporaryError("A mount does not answer.", code="volume_unavailable")
        if result[0] is not None:
            raise result[0]

    def _unmount(self, name: str) -> None:
        """Whatever there is of it; what a killed process left too."""
        top = self._root / name
        if not top.is_dir():
            return
        unmount(self.path(name))
        self._end(top)
        if not self._buckets.end(name):
            # The directory stays, by which its group is found again.
            log.warning("mount.does_not_end", name=name)
            return
        unmount(top / "scratch")
        # Earlier versions kept a log there.
        for file in (STATE, "log", "scratch.image"):
            (top / file).unlink(missing_ok=True)
        # Never recursively: if one of them still is a mount, that would be its end.
        for directory in (top / "files", top / "scratch", top):
            try:
                directory.rmdir()
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("mount.not_removed", name=name, error=str(error))
                return

    def _kill(self, top: Path) -> None:
        """End the s3fs of a mount at once, if it has one."""
        if (known := _process(top)) is not None:
            log.info("mount.ended", name=top.name, pid=known[0], signal="SIGKILL")
            processes.kill(*known)

    def _end(self, top: Path) -> None:
        """
        s3fs ends by itself when nobody has the mount any more; one that does not is made to.
        Somebody else's mount namespace may hold a copy of it, in which nothing is open: what was
        written is in the bucket when the instances that wrote it have ended.
        """
        if (known := _process(top)) is None:
            return
        pid, started = known
        for seconds, number in ENDING:
            deadline = time.monotonic() + seconds
            while processes.start_time(pid) == started and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            if processes.start_time(pid) != started:
                break
            log.info("mount.ended", name=top.name, pid=pid, signal=number.name)
            processes.kill(pid, started, number)
        self._started = [known for known in self._started if known.poll() is None]


def _process(top: Path) -> tuple[int, int] | None:
    """The s3fs of a mount, and when it began."""
    try:
        state = json.loads((top / STATE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return int(state["pid"]), int(state["started"] or -1)


def _mount_image(image: Path, target: Path) -> None:
    """
    By the device that has it already, if one has: the kernel keeps one file system of a device
    however often it is mounted, and would damage that of a second device on the same image.
    """
    for _ in range(3):
        device = loop_device_of(image)
        if device is None:
            repair_image(image)
            mount_calls.mount_image(str(image), str(target))
            return
        try:
            mount_calls.mount_device(device, str(target))
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.EIO, errno.EINVAL, errno.ENOENT):
                raise
            time.sleep(POLL_SECONDS)  # The last one who had it has just let it go.
        else:
            return
    raise TemporaryError(f"{image} is let go of right now.", code="volume_busy")


def _hand_over(top: Path, uid: int, owner: int | None) -> None:
    """Give a file system to the uid that is to use it."""
    if owner is not None:
        done = mount_program(mount_calls.MAP, top, owner, uid, timeout=MAP_SECONDS)
        if done.returncode:
            raise OSError(errno.EPERM, f"{top}: {done.stderr.strip()[-500:]}")
    if top.stat().st_uid != uid:
        os.chown(top, uid, uid)
        with contextlib.suppress(FileNotFoundError):
            (top / "lost+found").rmdir()


def _empty(path: Path) -> None:
    """
    From the leaves up, without renames, which are copies there; a bucket's keys are short enough to
    go down by the stack.
    """

    def note(function: object, name: str, failure: tuple[type, BaseException, object]) -> None:
        # Some stores drop a directory with the last object in it.
        if not isinstance(failure[1], FileNotFoundError):
            raise failure[1]

    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, onerror=note)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
