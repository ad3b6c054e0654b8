"""API keys of a data directory: the first one, and access for its owner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from atoll import ids
from atoll.app.data_directory import make_data_dir
from atoll.app.stores import open_store
from atoll.clock import SystemClock
from atoll.model.api_key import Scope, digest
from atoll.service.auth.service import ApiKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.settings import Settings


KEY_FILE = "key"


ENVIRONMENT = "environment"
"""Name of the key that comes from ATOLL_API_KEY."""


@asynccontextmanager
async def keys(settings: Settings) -> AsyncIterator[ApiKeys]:
    """The keys of a data directory, for its owner."""
    await asyncio.to_thread(make_data_dir, settings.data_dir)
    store = open_store(settings)
    await store.open()
    try:
        yield ApiKeys(store, SystemClock(), settings.recall)
    finally:
        await store.close()


async def ensure_first_key(settings: Settings, found: ApiKeys) -> Path | None:
    """
    The key of the environment, or the one in the key file, made at the first start. A key that came
    from the environment at an earlier start, and is no longer set there, is revoked.
    """
    given = settings.api_key
    for key in await found.list():
        if key.name == ENVIRONMENT and (given is None or key.digest != digest(given)):
            await found.remove(key.id)
    if given is not None:
        await found.adopt(ENVIRONMENT, Scope.FULL, given)
        return None
    path = settings.data_dir / KEY_FILE
    secret = await asyncio.to_thread(_read_or_make_key, path)
    await found.adopt("first", Scope.FULL, secret)
    return path


def _read_or_make_key(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    secret = ids.api_key()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w") as file:
        file.write(secret + "\n")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)  # Unlike a rename, it never replaces the key of another start.
    temporary.unlink()
    return path.read_text().strip()
