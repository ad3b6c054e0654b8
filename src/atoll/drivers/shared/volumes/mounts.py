"""
Mounts that instances share: volumes, and workspaces in the bucket.

A mount is made when the first instance needs it, and removed after the last one. The names of an
instance's mounts are recorded in its directory, so all replicas of the node know them, also after a
restart. A mount that does not answer any more, for example because its s3fs died, is replaced for
the next instance that needs it; instances that have it keep the dead one.

User code chooses the file names in a mount. Only its top directory is accessed here, by a thread
that is abandoned if it takes too long, and nothing is removed recursively where something may be
mounted. Blocking; callers use a thread.
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
from atoll.drivers.shared import bounded_log, mount_syscalls, processes
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

LOCK_FILES = 64
POLL_INTERVAL = 0.01
KILL_SCHEDULE = ((0.5, signal.SIGTERM), (10.0, signal.SIGKILL), (10.0, signal.SIGKILL))
"""Seconds that an unmounted s3fs may take to end, and the signal that it gets then."""
STATE = "mount.json"
"""In the directory of a mount by s3fs: the file with its pid."""
USED = "mounts.json"
"""In an instance's directory: the file with the names of its mounts."""
MAP_TIMEOUT = 30.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Mount:
    """Exactly one of `image` and `view` is set, or neither for a mount of the bucket."""

    name: str
    image: Path | None = None
    """A file system image."""
    view: Path | None = None
    """A directory that is mounted read-only, without devices and setuid."""
    prefix: str | None = None
    """The part of the bucket; all of it if not set."""
    uid: int | None = None
    """The owner, who alone can access a mount of the bucket; every uid can if not set."""
    owner: int | None = None
    """The uid that files have in the image, if that is not `uid`."""
    new: bool = False
    """Whether the image was made a moment ago, so that it needs no repair and is not in use."""


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
        Remove mounts that no instance has any more. `scratch_size` is in bytes, None if the node
        has no images.
        """
        self._scratch_size = scratch_size
        self._root.mkdir(mode=0o700, exist_ok=True)
        self.release(entry.name for entry in os.scandir(self._root) if entry.is_dir())

    def path(self, name: str) -> Path:
        return self._root / name / "files"

    def note(self, instance_id: str, names: list[str]) -> None:
        """Record an instance's mounts, before they are made: from now on they are in use."""
        (self._instances / instance_id / USED).write_text(json.dumps(names))

    def noted(self, instance_id: str) -> list[str]:
        try:
            found: list[str] = json.loads((self._instances / instance_id / USED).read_text())
        except (FileNotFoundError, ValueError):
            return []
        return found

    def is_of_bucket(self, name: str) -> bool:
        return (self._root / name / STATE).exists()

    def ensure(self, mount: Mount) -> None:
        """Make the mount, unless it exists and answers; an instance must have recorded it."""
        with self._locked(mount.name):
            if self._mounted(mount.name) and self._answers(mount.name):
                return
            self._unmount(mount.name)
            try:
                self._mount(mount)
            except BaseException:
                self._unmount(mount.name)
                raise

    def sync(self, mount: Mount) -> None:
        """
        Flush a file system to disk. It may be mounted in the namespace of an instance alone; then
        it is mounted here for that.
        """
        self.ensure(mount)
        try:
            fd = os.open(self.path(mount.name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                processes.sync_file_system(fd)
            finally:
                os.close(fd)
        finally:
            self.release([mount.name])

    def release(self, names: Iterable[str]) -> None:
        """Unmount those that no instance uses."""
        for name in names:
            with self._locked(name):
                if not self.in_use(name):
                    self._unmount(name)

    def in_use(self, name: str) -> bool:
        return any(name in self.noted(entry) for entry in os.listdir(self._instances))

    def broken(self) -> list[str]:
        """
        Ids of instances with a mount that does not answer. Its s3fs is killed: processes with an
        open file there could not be killed before.
        """
        found: dict[str, list[str]] = {}
        if not self._root.is_dir():
            return []
        for entry in os.scandir(self._instances):
            for name in self.noted(entry.name):
                # A file system on this machine's disk always answers.
                if self.is_of_bucket(name):
                    found.setdefault(name, []).append(entry.name)
        result: list[str] = []
        for name, instances in found.items():
            with self._locked(name):  # Waits while it is being mounted.
                if self._mounted(name) and not self._answers(name):
                    self._kill(self._root / name)
                    result += [each for each in instances if name in self.noted(each)]
        return result

    def make_prefix(self, prefix: str) -> None:
        """Make the directory of a prefix: some versions of s3fs mount existing ones only."""
        with self._bucket_root() as root:
            self._bounded(lambda: self._buckets.directory(prefix, root).mkdir(0o755, True, True))

    def remove_prefix(self, prefix: str) -> None:
        """Remove all files below a prefix, through a mount of the prefix."""
        # Twice, because S3 may have been unavailable for a moment.
        failure = self._emptied(prefix) and self._emptied(prefix)
        with self._bucket_root() as root, contextlib.suppress(FileNotFoundError):
            try:
                self._bounded(self._buckets.directory(prefix, root).rmdir)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                if failure is not None and failure.errno != errno.EIO:
                    raise failure from None  # A retry may succeed.
                # Keys with control characters are not in S3's XML listings, and other programs
                # may have written keys that are not valid file names.
                raise NotEmptied(
                    f"{prefix} still has objects whose names cannot be listed. Remove them with "
                    "an S3 client, and try again."
                ) from None

    def _emptied(self, prefix: str) -> OSError | None:
        """Empty a prefix; returns the error if s3fs could not list or remove something."""
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

    # One mount

    @contextlib.contextmanager
    def _bucket_root(self) -> Iterator[Path]:
        name = f"bucket-{os.getpid()}-{threading.get_ident()}"
        with self._locked(name):
            try:
                self._mount(Mount(name))
                yield self.path(name)
            finally:
                self._unmount(name)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """
        Lock a mount among all replicas. Mounts share a few lock files, which are never removed.
        """
        number = zlib.crc32(name.encode()) % LOCK_FILES
        fd = os.open(self._root / f"lock-{number:02}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _mount(self, mount: Mount) -> None:
        top = self._root / mount.name
        for directory in (top, top / "files", top / "scratch"):
            directory.mkdir(mode=0o700, exist_ok=True)
        if mount.image is not None:
            _mount_image(mount.image, top / "files", new=mount.new)
            if mount.uid is not None:
                _hand_over(top / "files", mount.uid, mount.owner)
            return
        if mount.view is not None:
            mount_syscalls.mount_view(str(mount.view), str(top / "files"))
            return
        problem = self._buckets.problem()
        if problem is not None:
            raise TemporaryError(f"{mount.name}: {problem}.", code="volume_unavailable")
        if self._scratch_size is not None:
            image = top / "scratch.image"
            make_file_system(image, self._scratch_size)
            mount_syscalls.mount_image(str(image), str(top / "scratch"))
            image.unlink()  # The kernel frees it with the mount.
        output = bounded_log.create_log()
        try:
            process = self._buckets.start(
                mount.prefix, top, output, mount.uid, bounded=self._scratch_size is not None
            )
            self._started = [known for known in self._started if known.poll() is None] + [process]
            state = {"pid": process.pid, "started": processes.start_time(process.pid)}
            (top / STATE).write_text(json.dumps(state))
            self._await(mount.name, process, output)
        finally:
            os.close(output)

    def _await(self, name: str, process: subprocess.Popen[bytes], output: int) -> None:
        deadline = time.monotonic() + self._timeout
        while process.poll() is None and time.monotonic() < deadline:
            if self._mounted(name):
                # The mount exists before s3fs has checked the bucket.
                if self._answers(name) and process.poll() is None:
                    return
                break
            time.sleep(POLL_INTERVAL)
        log.warning("mount.failed", name=name, output=bounded_log.read_log_tail(output))
        raise TemporaryError(
            f"{name} could not be mounted: the blob store does not answer, or refuses access. See "
            "the output of s3fs in the server's log.",
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
        """Call `work` in a thread that is abandoned after the timeout."""
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
        """Remove a mount, also one that a killed process has left half-made."""
        top = self._root / name
        if not top.is_dir():
            return
        unmount(self.path(name))
        self._end(top)
        if not self._buckets.end(name):
            # Its control group is found again by the directory.
            log.warning("mount.not_killed", name=name)
            return
        unmount(top / "scratch")
        # Earlier versions kept a log there.
        for file in (STATE, "log", "scratch.image"):
            (top / file).unlink(missing_ok=True)
        # Not recursively: if one is still mounted, that would delete its files.
        for directory in (top / "files", top / "scratch", top):
            try:
                directory.rmdir()
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("mount.not_removed", name=name, error=str(error))
                return

    def _kill(self, top: Path) -> None:
        """Kill the s3fs of a mount, if it has one."""
        if (known := _process(top)) is not None:
            log.info("mount.ended", name=top.name, pid=known[0], signal="SIGKILL")
            processes.kill(*known)

    def _end(self, top: Path) -> None:
        """
        Wait for the end of s3fs, which follows the unmount, and kill it otherwise. The mount may
        live on in another namespace, with no file open: all writes of instances that have ended
        are in the bucket.
        """
        if (known := _process(top)) is None:
            return
        pid, started = known
        for seconds, number in KILL_SCHEDULE:
            deadline = time.monotonic() + seconds
            while processes.start_time(pid) == started and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL)
            if processes.start_time(pid) != started:
                break
            log.info("mount.ended", name=top.name, pid=pid, signal=number.name)
            processes.kill(pid, started, number)
        self._started = [known for known in self._started if known.poll() is None]


def _process(top: Path) -> tuple[int, int] | None:
    """Pid and start time of the s3fs of a mount."""
    try:
        state = json.loads((top / STATE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return int(state["pid"]), int(state["started"] or -1)


def _mount_image(image: Path, target: Path, *, new: bool) -> None:
    """
    Mount an image, from its existing loop device if it has one: two loop devices on one image would
    be two file systems in the kernel, and damage it.
    """
    for _ in range(3):
        device = None if new else loop_device_of(image)
        if device is None:
            if not new:
                repair_image(image)
            mount_syscalls.mount_image(str(image), str(target))
            return
        try:
            mount_syscalls.mount_device(device, str(target))
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.EIO, errno.EINVAL, errno.ENOENT):
                raise
            time.sleep(POLL_INTERVAL)  # It has just been detached.
        else:
            return
    raise TemporaryError(f"{image} is being detached.", code="volume_busy")


def _hand_over(top: Path, uid: int, owner: int | None) -> None:
    """Give the files of a mounted file system to a uid."""
    if owner is not None:
        done = mount_program(mount_syscalls.MAP_OWNER, top, owner, uid, timeout=MAP_TIMEOUT)
        if done.returncode:
            raise OSError(errno.EPERM, f"{top}: {done.stderr.strip()[-500:]}")
    if top.stat().st_uid != uid:
        os.chown(top, uid, uid)
        with contextlib.suppress(FileNotFoundError):
            (top / "lost+found").rmdir()


def _empty(path: Path) -> None:
    """
    Remove all files, from the leaves up. Without renames, which are copies in a bucket; its keys
    are short enough for recursion.
    """

    def note(function: object, name: str, failure: tuple[type, BaseException, object]) -> None:
        # Some stores remove a directory with its last object.
        if not isinstance(failure[1], FileNotFoundError):
            raise failure[1]

    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, onerror=note)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
