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
        # Through the descriptor: the whole path may be longer than a socket's name can be.
        path = f"/proc/self/fd/{fd}/{FILE}"
        return await Link.connect(path, settings, timeout=timeout, token=token)
    finally:
        os.close(fd)
