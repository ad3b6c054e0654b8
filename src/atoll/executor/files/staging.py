"""
Staging: files that a run writes to `.tmp/<run id>` appear in the workspace only if it succeeds.

Each file is moved by one rename; after a failure all are removed. Directories are merged and files
replace files. Conflicts (a directory where a file is, or vice versa) are found before anything is
moved: then nothing is moved and the run fails with `staging_conflict`, because the files of a
completed run must all be there.

User code may have put anything into the tree. No link in it is followed, and neither stack nor
descriptors depend on its size or depth. Long work is done in slices of the event loop.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from ..event_loop import Loop, Timer
from .paths import STAGING, UPLOAD, is_directory, open_below
from .removal import DIRECTORY, TRASH, removing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Iterator

    Problem = dict[str, str]
    """Code and message of why a run has failed after all."""

SLICE_SECONDS = 0.005
TIDY_DELAY = 0.05
"""Seconds until an empty area that no run has taken over is removed."""
MODE = 0o755
MOVE_TIMEOUT = 30.0
REMOVE_TIMEOUT = 30.0
MAX_ENTRIES = 200_000
"""Entries that are moved one by one; a new directory counts as one."""
MAX_DEPTH = 64


class StagingError(Exception):
    """Why the staged files cannot be moved."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Staging:
    def __init__(self, loop: Loop, root: str) -> None:
        self._loop = loop
        self._path = root
        self._root = os.open(root, os.O_DIRECTORY | os.O_CLOEXEC | os.O_RDONLY)
        self._bins = 0
        self._spare: str | None = None
        """The empty area of an ended run, which the next run may get."""
        self._spare_timer: Timer | None = None

    def clear(self) -> None:
        """Remove what earlier runs left. Called when the executor starts."""
        try:
            if is_directory(STAGING, self._root):
                self._discard(self._root, STAGING)
            with os.scandir(self._root) as items:
                names = [
                    item.name
                    for item in items
                    # Uploads at the top: incomplete trees of workers that were killed.
                    if item.name.startswith((TRASH, UPLOAD)) and item.is_dir(follow_symlinks=False)
                ]
        except OSError:
            return  # The next start tries again; runs do not depend on it.
        for name in names:
            self._remove(name)

    def make(self, name: str) -> str:
        """
        Make the staging area of a run; returns its path. If another file has its name, returns an
        empty string: the code may run and can clean up.
        """
        top = "%s/%s" % (self._path, STAGING)
        area = "%s/%s" % (top, name)
        spare, self._spare = self._spare, None
        if self._spare_timer is not None:
            self._spare_timer.cancel()
            self._spare_timer = None
        try:
            if stat.S_ISLNK(os.lstat(top).st_mode):
                return ""
            if spare is not None:
                # A tenth of the time that removing one and making one takes.
                os.rename("%s/%s" % (top, spare), area)
                return area
        except OSError:
            try:
                os.mkdir(top, MODE)
            except OSError:
                pass  # Another run has made it, or the next call fails.
        try:
            os.mkdir(area, MODE)
        except FileExistsError:
            return area if stat.S_ISDIR(os.lstat(area).st_mode) else ""
        except OSError:
            return ""
        return area

    def settle(
        self, name: str, keep: bool, in_use: bool, done: Callable[[Problem | None], None]
    ) -> None:
        """
        Move the files that an ended run has staged into the workspace, or remove them. `done` is
        called now or later, with the reason if they could not be moved. An area that is `in_use`
        may have processes of the run that still know it.
        """
        if self._is_empty(name):
            # The usual case. Removing takes longer than everything else, so it is done later.
            timer = self._loop.after(TIDY_DELAY, lambda: self._tidy(name))
            if self._spare is None and not in_use:
                self._spare, self._spare_timer = name, timer
            done(None)
            return
        try:
            area = _open_accessible(STAGING, self._root)
        except OSError:
            # It does not exist, or user code has replaced it: nothing is staged.
            done(None)
            return
        publish = False
        try:
            if keep:
                publish = True
            else:
                self._discard(area, name)
        except OSError:
            pass  # Not accessible or not there: the next start removes the rest.
        finally:
            os.close(area)
        if publish:
            self._work(
                self._publish(name), MOVE_TIMEOUT, lambda error: self._moved(name, error, done)
            )
        else:
            done(None)

    def _is_empty(self, name: str) -> bool:
        """
        Checked by path, although user code may redirect it: then nothing is staged either. Anything
        but a readable directory with its first permissions counts as not empty.
        """
        area = "%s/%s/%s" % (self._path, STAGING, name)
        try:
            if os.lstat(area).st_mode != stat.S_IFDIR | MODE:
                return False
            with os.scandir(area) as items:
                return next(items, None) is None
        except OSError:
            return False

    def _tidy(self, name: str) -> None:
        if self._spare == name:
            self._spare = self._spare_timer = None
        try:
            area = os.open(STAGING, DIRECTORY, dir_fd=self._root)
            try:
                os.rmdir(name, dir_fd=area)
            finally:
                os.close(area)
        except OSError:
            pass  # A background process of the run uses it.

    def _moved(
        self, name: str, error: Exception | None, done: Callable[[Problem | None], None]
    ) -> None:
        problem = None
        if isinstance(error, StagingError):
            problem = {"code": error.code, "message": str(error)}
        elif error is not None:
            message = "Not all staged files could be moved into the workspace: %s."
            problem = {"code": "staging_failed", "message": message % error}
        try:
            area = _open_accessible(STAGING, self._root)
            try:
                self._discard(area, name)
            finally:
                os.close(area)
        except OSError:
            pass  # As above.
        done(problem)

    # Move

    def _publish(self, name: str) -> Iterator[None]:
        yield from self._walk(name, self._check)
        yield from self._walk(name, self._move)

    def _walk(self, name: str, visit: Callable[[int, int, str, list[str]], bool]) -> Iterator[None]:
        """Visit staged entries; enters a directory if `visit` returns that both sides have it."""
        waiting: list[list[str]] = [[]]
        seen = 0
        while waiting:
            parts = waiting.pop()
            source = open_below(self._root, [STAGING, name, *parts], _open_accessible)
            try:
                target = open_below(self._root, parts)
                try:
                    for item in _names(source):
                        seen += 1
                        if seen > MAX_ENTRIES:
                            message = "More than %d staged files; pack them." % MAX_ENTRIES
                            raise StagingError("staging_failed", message)
                        if visit(source, target, item, parts):
                            waiting.append([*parts, item])
                        yield
                finally:
                    os.close(target)
            finally:
                os.close(source)

    def _check(self, source: int, target: int, item: str, parts: list[str]) -> bool:
        path = "/".join([*parts, item])
        there = is_directory(item, target)
        if path == STAGING:
            raise StagingError("staging_conflict", "%s cannot be staged in itself." % STAGING)
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=target):
            message = "%s cannot be moved into the workspace: its directory is not writable."
            raise StagingError("staging_conflict", message % path)
        if there is None:
            return False
        here = is_directory(item, source)
        if here is not None and here != there:
            message = "%s is staged as %s, and is %s in the workspace. Nothing staged was moved."
            kinds = ("something else", "a directory")
            raise StagingError("staging_conflict", message % (path, kinds[here], kinds[there]))
        if here and len(parts) + 1 >= MAX_DEPTH:
            message = "%s/… has too many levels to be merged (at most %d)."
            raise StagingError("staging_failed", message % (path[:200], MAX_DEPTH))
        return bool(here)

    def _move(self, source: int, target: int, item: str, parts: list[str]) -> bool:
        try:
            if is_directory(item, target) and is_directory(item, source):
                return len(parts) + 1 < MAX_DEPTH
            _rename(item, source, target)
        except FileNotFoundError:
            pass  # Removed by a background process of the run.
        return False

    # Remove

    def _discard(self, directory: int, name: str) -> None:
        """Remove the name now, and the content in later turns."""
        try:
            os.rmdir(name, dir_fd=directory)
            return
        except FileNotFoundError:
            return
        except NotADirectoryError:
            os.unlink(name, dir_fd=directory)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        self._bins += 1
        trash = "%s%d-%d" % (TRASH, time.time_ns(), self._bins)
        # Moving a directory needs the right to write to it.
        os.chmod(name, 0o700, dir_fd=directory)
        os.rename(name, trash, src_dir_fd=directory, dst_dir_fd=self._root)
        self._remove(trash)

    def _remove(self, trash: str) -> None:
        # User code may refill the directory. The remains are removed at the next start, or when the
        # files API removes a directory.
        self._work(removing(self._root, trash), REMOVE_TIMEOUT, lambda error: None)

    def _work(
        self, steps: Iterator[None], seconds: float, done: Callable[[Exception | None], None]
    ) -> None:
        """Run the steps in slices, one in each turn of the loop."""
        deadline = time.monotonic() + seconds

        def work() -> None:
            problem: Exception | None = None
            until = time.monotonic() + SLICE_SECONDS
            try:
                for _ in steps:
                    now = time.monotonic()
                    if now > deadline:
                        raise TimeoutError(errno.ETIMEDOUT, "it took longer than %d s" % seconds)
                    if now > until:
                        self._loop.after(0.0, work)
                        return
            except (OSError, StagingError) as error:
                problem = error
            done(problem)

        work()


def _open_accessible(name: str, directory: int) -> int:
    """Open a directory, restoring the rights that its owner took away."""
    try:
        fd = os.open(name, DIRECTORY, dir_fd=directory)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=directory)
        fd = os.open(name, DIRECTORY, dir_fd=directory)
    mode = os.fstat(fd).st_mode
    if mode & 0o700 != 0o700:
        try:
            os.fchmod(fd, stat.S_IMODE(mode) | 0o700)
        except OSError:
            pass  # Of another owner; operations that are not allowed fail.
    return fd


def _names(fd: int) -> list[str]:
    with os.scandir(fd) as items:
        return [item.name for _, item in zip(range(MAX_ENTRIES + 1), items)]


def _rename(name: str, source: int, target: int) -> None:
    try:
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
    except PermissionError:
        # Moving a directory needs write permission for it.
        mode = os.stat(name, dir_fd=source, follow_symlinks=False).st_mode
        if not stat.S_ISDIR(mode):
            raise
        os.chmod(name, 0o700, dir_fd=source)
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
        os.chmod(name, stat.S_IMODE(mode), dir_fd=target)
