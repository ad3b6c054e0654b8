"""Files that the control plane sends, and the conditions under which they replace others."""

from __future__ import annotations

import errno
import os

from .entries import entry_of, etag
from .paths import FileError, translate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Condition:
    """
    A precondition on the file to replace: its tag must be one of `match` ("*" for any file), and
    none of `none` ("*" for no file at all).
    """

    def __init__(self, match: list[str] | None, none: list[str] | None) -> None:
        self.match = match
        self.none = none

    @property
    def new(self) -> bool:
        return self.none is not None and "*" in self.none

    def check(self, name: str, fd: int, path: str) -> None:
        if self.match is None and self.none is None:
            return
        try:
            found = etag(os.stat(name, dir_fd=fd, follow_symlinks=False))
        except FileNotFoundError:
            if self.match is not None:
                raise FileError("precondition_failed", "%s does not exist" % path) from None
            return
        if self.match is not None and not {"*", found} & set(self.match):
            raise FileError("precondition_failed", "%s has another ETag than expected" % path)
        if self.none is not None and {"*", found} & set(self.none):
            raise FileError("precondition_failed", "%s already exists" % path)


class Upload:
    """A file that is being received. It appears under its name at `finish`, or not at all."""

    def __init__(
        self, directory: int, temporary: str, name: str, file: int, path: str, condition: Condition
    ) -> None:
        self._directory = directory
        self._temporary = temporary
        self._name = name
        self._file = file
        self._condition = condition
        self.path = path

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            raise translate(error, self.path) from None

    def finish(self) -> dict[str, Any]:
        here = self._directory
        try:
            self._condition.check(self._name, here, self.path)
            if self._condition.new:
                # Unlike a rename, a link never replaces a file that was just created.
                os.link(self._temporary, self._name, src_dir_fd=here, dst_dir_fd=here)
                os.unlink(self._temporary, dir_fd=here)
            else:
                os.rename(self._temporary, self._name, src_dir_fd=here, dst_dir_fd=here)
            status = os.fstat(self._file)
        except FileError:
            self.abandon()
            raise
        except OSError as error:
            self.abandon()
            if self._condition.new and error.errno == errno.EEXIST:
                message = "%s already exists" % self.path
                raise FileError("precondition_failed", message) from None
            raise translate(error, self.path) from None
        self._close()
        return entry_of(self.path, status)

    def abandon(self) -> None:
        try:
            os.unlink(self._temporary, dir_fd=self._directory)
        except OSError:
            pass  # User code may have removed it.
        self._close()

    def _close(self) -> None:
        os.close(self._file)
        os.close(self._directory)
