"""
How the executor of a container is reached.

By a unix socket in a directory that it shares with us, where there is one. Else through the engine:
a relay that the engine starts in the container takes the link's bytes on its standard input, and
says those of the executor on its standard output. That connection is the engine's own, so it is as
safe as all else that is told to the engine; and the container needs no network. The relay is of
another user than user code, and the executor listens to nobody else.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from atoll.link.client import Link, LinkLost

if TYPE_CHECKING:
    from datetime import timedelta
    from pathlib import Path

    from atoll.settings import LinkSettings

SOCKET, RELAY = "socket", "relay"
"""The two ways, as a container's label names them."""
FILE = "link.sock"
NAME = "atoll-link"
"""Abstract name of the socket that relays connect to."""
RELAY_UID = 1001
RELAYS = 16
"""Relays that a container has room for beside user code's processes."""


async def by_socket(
    directory: Path, settings: LinkSettings, *, timeout: timedelta, token: str
) -> Link:
    try:
        fd = os.open(directory, os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise LinkLost(f"{directory} is gone.") from None
    try:
        # Through descriptors: the whole path may be longer than a socket's name can be, and what
        # ran inside before the directory was sealed may have left a link there.
        found = os.open(FILE, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    except FileNotFoundError:
        raise LinkLost(f"{directory} has no socket.") from None
    finally:
        os.close(fd)
    try:
        if not stat.S_ISSOCK(os.fstat(found).st_mode):
            raise LinkLost(f"{directory / FILE} is not a socket.")
        path = f"/proc/self/fd/{found}"
        return await Link.connect(path, settings, timeout=timeout, token=token)
    finally:
        os.close(found)
