"""
`.tmp/<execution id>` in the workspace: what an execution writes there appears in the workspace when
it has succeeded, each file by one rename and so whole, and is removed when it has not.

Directories are merged, a file takes the place of a file. What cannot take its place (a directory
where a file is, or the other way round) is found before anything is moved, and then nothing is: the
execution has failed with `staging_conflict`, because who reads "completed" must find all of it.

User code may have made anything of the tree: no link in it is followed, and no time of PID 1's, no
stack and no descriptor goes by its size or depth. What is long is done in slices of the loop.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from ..event_loop import Loop
from .paths import STAGING, UPLOAD
from .removal import DIRECTORY, TRASH, removing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Iterator

    Problem = dict[str, str]
    """Code and message of what keeps an execution from being a success."""

SLICE_SECONDS = 0.005
TIDY_SECONDS = 0.001
MOVE_SECONDS = 30.0
REMOVE_SECONDS = 30.0
MAX_ENTRIES = 200_000
"""Counted are those that are moved one by one; a new directory is one, whatever is in it."""
MAX_DEPTH = 64


class Trouble(Exception):
    """Why what was staged cannot be moved."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Staging:
    def __init__(self, loop: Loop, root: str) -> None:
        self._loop = loop
        self._path = root
        self._root = os.open(root, os.O_DIRECTORY | os.O_CLOEXEC | os.O_RDONLY)
        self._bins = 0

    def clear(self) -> None:
        """At the executor's start: what runs before it left there is nobody's any more."""
        try:
            if _is_directory(STAGING, self._root):
                self._discard(self._root, STAGING)
            with os.scandir(self._root) as items:
                names = [
                    item.name
                    for item in items
                    # Uploads at the top: trees that were not whole yet when their maker was killed.
                    if item.name.startswith((TRASH, UPLOAD)) and item.is_dir(follow_symlinks=False)
                ]
        except OSError:
            return  # The next start may have more luck; code can run with it.
        for name in names:
            self._remove(name)

    def settle(self, name: str, keep: bool, done: Callable[[Problem | None], None]) -> None:
        """
        A run is over: move in what it staged, or remove it. `done` is called at once, or later,
        with what kept it from being moved.
        """
        if self._is_empty(name):
            # As it mostly is. Removing takes longer than all the rest: nobody waits for it.
            self._loop.after(TIDY_SECONDS, lambda: self._tidy(name))
            done(None)
            return
        try:
            area = _open_up(STAGING, self._root)
        except OSError:
            # There is none, or user code put something else there: nothing is staged.
            done(None)
            return
        publish = False
        try:
            if keep:
                publish = True
            else:
                self._discard(area, name)
        except OSError:
            pass  # Closed to us by user code, or not there: the next start removes the rest.
        finally:
            os.close(area)
        if publish:
            self._work(
                self._publish(name), MOVE_SECONDS, lambda error: self._moved(name, error, done)
            )
        else:
            done(None)

    def _is_empty(self, name: str) -> bool:
        """
        By its path, which user code may have led elsewhere: where that is empty nothing is staged
        either. What is no directory, or cannot be read, is not empty.
        """
        try:
            with os.scandir("%s/%s/%s" % (self._path, STAGING, name)) as items:
                return next(items, None) is None
        except OSError:
            return False

    def _tidy(self, name: str) -> None:
        try:
            area = os.open(STAGING, DIRECTORY, dir_fd=self._root)
            try:
                os.rmdir(name, dir_fd=area)
            finally:
                os.close(area)
        except OSError:
            pass  # What the execution left running is at it.

    def _moved(
        self, name: str, error: Exception | None, done: Callable[[Problem | None], None]
    ) -> None:
        problem = None
        if isinstance(error, Trouble):
            problem = {"code": error.code, "message": str(error)}
        elif error is not None:
            words = "What was staged could not all be moved into the workspace: %s."
            problem = {"code": "staging_failed", "message": words % error}
        try:
            area = _open_up(STAGING, self._root)
            try:
                self._discard(area, name)
            finally:
                os.close(area)
        except OSError:
            pass  # As above.
        done(problem)

    # Moving in

    def _publish(self, name: str) -> Iterator[None]:
        yield from self._walk(name, self._check)
        yield from self._walk(name, self._move)

    def _walk(self, name: str, visit: Callable[[int, int, str, list[str]], bool]) -> Iterator[None]:
        """Go through what is staged, deeper only where `visit` says that both sides have it."""
        waiting: list[list[str]] = [[]]
        seen = 0
        while waiting:
            parts = waiting.pop()
            source = self._open([STAGING, name, *parts], True)
            try:
                target = self._open(parts, False)
                try:
                    for item in _names(source):
                        seen += 1
                        if seen > MAX_ENTRIES:
                            words = "More than %d files are staged beside what is there already"
                            raise Trouble("staging_failed", words % MAX_ENTRIES + "; pack them.")
                        if visit(source, target, item, parts):
                            waiting.append([*parts, item])
                        yield
                finally:
                    os.close(target)
            finally:
                os.close(source)

    def _open(self, parts: list[str], writable: bool) -> int:
        """A directory beneath the workspace, no part of which is a link."""
        here = os.dup(self._root)
        try:
            for part in parts:
                below = _open_up(part, here) if writable else os.open(part, DIRECTORY, dir_fd=here)
                os.close(here)
                here = below
        except BaseException:
            os.close(here)
            raise
        return here

    def _check(self, source: int, target: int, item: str, parts: list[str]) -> bool:
        path = "/".join([*parts, item])
        there = _is_directory(item, target)
        if path == STAGING:
            raise Trouble("staging_conflict", "%s cannot be staged in itself." % STAGING)
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=target):
            words = "%s cannot be moved into the workspace: its directory is not writable."
            raise Trouble("staging_conflict", words % path)
        if there is None:
            return False
        here = _is_directory(item, source)
        if here is not None and here != there:
            words = "%s is staged as %s, and is %s in the workspace. Nothing staged was moved."
            kinds = ("something else", "a directory")
            raise Trouble("staging_conflict", words % (path, kinds[here], kinds[there]))
        if here and len(parts) + 1 >= MAX_DEPTH:
            words = "%s/… is nested too deep to be merged with what is there (%d levels)."
            raise Trouble("staging_failed", words % (path[:200], MAX_DEPTH))
        return bool(here)

    def _move(self, source: int, target: int, item: str, parts: list[str]) -> bool:
        try:
            if _is_directory(item, target) and _is_directory(item, source):
                return len(parts) + 1 < MAX_DEPTH
            _rename(item, source, target)
        except FileNotFoundError:
            pass  # Taken away by what the execution left running.
        return False

    # Removing

    def _discard(self, directory: int, name: str) -> None:
        """The name goes now, what it stands for in its own time."""
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
        # Moved only by who may write to it.
        os.chmod(name, 0o700, dir_fd=directory)
        os.rename(name, trash, src_dir_fd=directory, dst_dir_fd=self._root)
        self._remove(trash)

    def _remove(self, trash: str) -> None:
        # What is not done then, because it is refilled or not ours to remove, is so at the next
        # start, or when the files API removes a directory.
        self._work(removing(self._root, trash), REMOVE_SECONDS, lambda error: None)

    def _work(
        self, steps: Iterator[None], seconds: float, done: Callable[[Exception | None], None]
    ) -> None:
        """Do some of it now and the rest in later turns, so that the loop has time for others."""
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
            except (OSError, Trouble) as error:
                problem = error
            done(problem)

        work()


def make(root: str, name: str) -> str:
    """
    The staging area of a run, by the run's own process before user code; its path, or nothing where
    something that is no directory has its name: the code may run, and make order.
    """
    top = "%s/%s" % (root, STAGING)
    area = "%s/%s" % (top, name)
    try:
        if stat.S_ISLNK(os.lstat(top).st_mode):
            return ""
    except OSError:
        try:
            os.mkdir(top, 0o755)
        except OSError:
            pass  # Another run was faster; or it cannot be, which the next one says.
    try:
        os.mkdir(area, 0o755)
    except FileExistsError:
        return area if stat.S_ISDIR(os.lstat(area).st_mode) else ""
    except OSError:
        return ""
    return area


def _open_up(name: str, directory: int) -> int:
    """A directory, made usable for us if its owner closed it."""
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
            pass  # Not ours; what is not possible then fails by itself.
    return fd


def _names(fd: int) -> list[str]:
    with os.scandir(fd) as items:
        return [item.name for _, item in zip(range(MAX_ENTRIES + 1), items)]


def _is_directory(name: str, fd: int) -> bool | None:
    """None when there is nothing of that name."""
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def _rename(name: str, source: int, target: int) -> None:
    try:
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
    except PermissionError:
        # A directory is moved only by who may write to it.
        mode = os.stat(name, dir_fd=source, follow_symlinks=False).st_mode
        if not stat.S_ISDIR(mode):
            raise
        os.chmod(name, 0o700, dir_fd=source)
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
        os.chmod(name, stat.S_IMODE(mode), dir_fd=target)
