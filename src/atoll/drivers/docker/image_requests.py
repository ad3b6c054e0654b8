"""Requests that pull and build images: a stream of JSON messages, and a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp
from aiodocker.exceptions import DockerError

from atoll.drivers.docker.engine import LineTooLong, lines
from atoll.drivers.docker.errors import UNREACHABLE, BuildFailed, translated
from atoll.drivers.docker.progress import ProgressLines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from datetime import timedelta

    from atoll.drivers.docker.engine import Engine
    from atoll.errors import AtollError


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
        raise BuildFailed(f"{what} within {timeout.total_seconds():g} s.") from None


def _error_text(message: Mapping[str, Any]) -> str:
    """The error in a message with the key "error"."""
    detail = message.get("errorDetail")
    text = detail.get("message") if isinstance(detail, dict) else None
    return str(text or message["error"])
