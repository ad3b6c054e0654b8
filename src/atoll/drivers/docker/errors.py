"""
Errors of a Docker engine, and their translation into Atoll's.

aiodocker raises `DockerError` with the HTTP status of the engine's answer. Code that handles some
of these statuses does so inside `translated`, which turns the rest into errors of Atoll.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import aiohttp
from aiodocker.exceptions import DockerError

from atoll.errors import NodeFull, PermanentError, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_MODIFIED, NOT_FOUND, CONFLICT = 304, 404, 409
UNREACHABLE = 900
"""The status that aiodocker makes up when it cannot connect."""
NO_SPACE = "no space left on device"


class EngineUnavailable(TemporaryError):
    """The engine does not answer, or has an internal error."""

    code = "engine_unavailable"


class EngineRefused(PermanentError):
    """The engine does not accept a request."""

    code = "engine_refused"


class EngineInsecure(PermanentError):
    """The engine cannot be used over TLS, and is not to be used without."""

    code = "engine_insecure"


class RegistryUnavailable(TemporaryError):
    code = "registry_unavailable"


class BuildFailed(PermanentError):
    """An image could not be pulled or built in time, or its Dockerfile is at fault."""

    code = "build_failed"


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """
    Raise errors of the connection, the HTTP client and the engine as `EngineUnavailable`,
    `NodeFull` or `EngineRefused`.
    """
    try:
        yield
    except DockerError as error:
        if error.status != UNREACHABLE and error.status < 500:
            raise EngineRefused(f"The Docker engine refused: {error.message}") from error
        full = NO_SPACE in str(error.message).lower()
        kind = NodeFull if full else EngineUnavailable
        raise kind(f"The Docker engine: {error.message}") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise EngineUnavailable(f"The Docker engine does not answer: {reason}") from error


@contextlib.contextmanager
def ignored(*statuses: int) -> Iterator[None]:
    """Suppress a `DockerError` with one of these statuses."""
    try:
        yield
    except DockerError as error:
        if error.status not in statuses:
            raise
