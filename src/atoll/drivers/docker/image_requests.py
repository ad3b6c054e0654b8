"""
What a pull and a build have in common: a stream of JSON messages, a time limit, and the credentials
of a registry in a header.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp
from aiodocker.exceptions import DockerError

from atoll.drivers.docker.engine import LineTooLong, lines
from atoll.drivers.docker.errors import UNREACHABLE, BuildFailed, translated
from atoll.drivers.docker.progress import ProgressLines
from atoll.model.image import HUB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from datetime import timedelta

    from atoll.drivers.base import RegistryAuth
    from atoll.drivers.docker.engine import Engine
    from atoll.errors import AtollError

HUB_KEY = "https://index.docker.io/v1/"
"""The engine's name of Docker Hub, the registry of image names without a server."""


async def messages(
    engine: Engine,
    path: str,
    params: Mapping[str, str],
    headers: Mapping[str, str],
    data: AsyncIterator[bytes] | None = None,
) -> AsyncIterator[dict[str, Any]]:
    """
    Messages of a POST request without a time limit of its own. The engine stops the pull or the
    build when the caller stops reading.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=engine.timeout.total_seconds())
    async with engine.docker._query(
        path, "POST", params=dict(params), data=data, headers=headers, timeout=timeout
    ) as response:
        try:
            async for line in lines(response):
                yield json.loads(line)
        except LineTooLong:
            raise BuildFailed("A command of the Dockerfile prints an endless line.") from None
        finally:
            # Closed, not returned to the pool: there may be more to read.
            response.close()


async def follow(
    stream: AsyncIterator[dict[str, Any]],
    on_output: Callable[[bytes], None],
    error_of: Callable[[str], AtollError],
) -> None:
    """Log messages until the request ends; `error_of` makes an error of what the engine reports."""
    progress = ProgressLines()
    with translated():
        try:
            async for message in stream:
                if "error" in message:
                    raise error_of(_error_text(message))
                if text := progress.text(message):
                    on_output(text.encode("utf-8", "replace"))
        except DockerError as error:
            if error.status == UNREACHABLE:
                raise
            raise error_of(str(error.message)) from None


@contextlib.asynccontextmanager
async def time_limit(timeout: timedelta, what: str) -> AsyncIterator[None]:
    """Raise `BuildFailed` after the time."""
    try:
        async with asyncio.timeout(timeout.total_seconds()):
            yield
    except TimeoutError:
        raise BuildFailed(f"{what} in {timeout}.") from None


def _error_text(message: Mapping[str, Any]) -> str:
    """The error in a message with the key "error"."""
    detail = message.get("errorDetail")
    text = detail.get("message") if isinstance(detail, dict) else None
    return str(text or message["error"])


def server_key(auth: RegistryAuth) -> str:
    return HUB_KEY if auth.server == HUB else auth.server


def credentials(auth: RegistryAuth) -> dict[str, str]:
    server = server_key(auth)
    if auth.identity_token:
        return {"identitytoken": auth.identity_token, "serveraddress": server}
    return {"username": auth.username, "password": auth.password, "serveraddress": server}


def header(value: Mapping[str, Any]) -> str:
    """Value of the headers X-Registry-Auth and X-Registry-Config."""
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()
