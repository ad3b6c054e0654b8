"""How a file is described to the control plane."""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def entry_of(path: str, status: os.stat_result) -> dict[str, Any]:
    mode = status.st_mode
    kind = (
        "file"
        if stat.S_ISREG(mode)
        else "directory"
        if stat.S_ISDIR(mode)
        else "symlink"
        if stat.S_ISLNK(mode)
        else "other"
    )
    return {
        "path": path,
        "type": kind,
        "size": status.st_size,
        "mode": stat.S_IMODE(mode),
        "modified": status.st_mtime_ns,
        "etag": etag(status),
    }


def etag(status: os.stat_result) -> str:
    """
    A tag that changes whenever the content may have changed: user code cannot set the change time.
    Two changes within one tick of the kernel's clock (4 ms) that keep the size look like one.
    """
    return "%x-%x-%x-%x" % (
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
