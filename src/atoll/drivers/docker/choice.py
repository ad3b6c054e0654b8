"""Whether workspaces can be directories of ours, or have to be volumes of the engine."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import TYPE_CHECKING

from aiodocker.exceptions import DockerError

from atoll.drivers.docker.containers import bind
from atoll.drivers.docker.engine import translated
from atoll.errors import PermanentError

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.drivers.docker.drafts import Drafts
    from atoll.drivers.docker.engine import Engine

TARGET = "/probe"


async def obstacle(engine: Engine, drafts: Drafts, node: Path) -> str | None:
    """Why workspaces cannot be directories beneath `node`; none when they can."""
    if not engine.is_local:
        return f"the engine at {engine.url} may be on another machine"
    if os.geteuid() != 0:
        return "Atoll is not root, and files inside belong to another user"
    options = engine.info.get("SecurityOptions") or []
    for name, words in (
        ("name=userns", "the engine gives users in containers other numbers"),
        ("name=rootless", "the engine is not root"),
    ):
        if any(name in option for option in options):
            return words
    if not await _is_seen(drafts, node):
        return f"the engine does not see {node} at the same path"
    return None


async def _is_seen(drafts: Drafts, node: Path) -> bool:
    """Whether the engine finds a file of ours where we have it."""
    file, content = node / f".probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
    await asyncio.to_thread(file.write_bytes, content)
    try:
        with translated():
            async with drafts.made(bind(str(file), TARGET, read_only=True)) as draft:
                return await drafts.get(draft, TARGET) == content
    except PermanentError as error:
        if isinstance(error.__cause__, DockerError):
            return False  # There is nothing at that path.
        raise
    finally:
        await asyncio.to_thread(file.unlink)
