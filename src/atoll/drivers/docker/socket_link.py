"""Links over a unix socket in a directory that a container shares with this machine."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from atoll.link.client import Link
from atoll.link.errors import LinkLost

if TYPE_CHECKING:
    from datetime import timedelta
    from pathlib import Path

    from atoll.settings import LinkSettings

SOCKET_FILE = "link.sock"


async def connect(
    directory: Path, settings: LinkSettings, *, timeout: timedelta, token: str
) -> Link:
    try:
        fd = os.open(directory, os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise LinkLost(f"{directory} does not exist.") from None
    try:
        # Through file descriptors: the full path may be longer than a socket address allows, and
        # code that ran before the directory was sealed may have left a symbolic link there.
        found = os.open(SOCKET_FILE, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    except FileNotFoundError:
        raise LinkLost(f"{directory} contains no socket.") from None
    finally:
        os.close(fd)
    try:
        if not stat.S_ISSOCK(os.fstat(found).st_mode):
            raise LinkLost(f"{directory / SOCKET_FILE} is not a socket.")
        path = f"/proc/self/fd/{found}"
        return await Link.connect(path, settings, timeout=timeout, token=token)
    finally:
        os.close(found)
