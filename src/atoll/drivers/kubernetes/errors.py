"""Errors of an API server, and their translation into Atoll's."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import aiohttp

from atoll.errors import NodeFull, PermanentError, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Iterator

UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT, GONE = 401, 403, 404, 409, 410
INVALID, TOO_MANY_REQUESTS, UNAVAILABLE = 422, 429, 503


class ClusterUnavailable(TemporaryError):
    """The API server does not answer, or is overloaded."""

    code = "cluster_unavailable"


class ClusterRefused(PermanentError):
    """The API server does not accept a request, for example for lack of a permission."""

    code = "cluster_refused"


class ImageNotPulled(PermanentError):
    """No node can get the image, or run it."""

    code = "image_not_pulled"


class RegistryUnavailable(TemporaryError):
    code = "registry_unavailable"


REFUSED_PULLS = ("not found", "notfound", "denied", "unauthorized", "forbidden", "manifest unknown",
                 "invalid", "not exist", "never", "no match for platform")  # fmt: skip
"""What kubelets report, in lower case, when another attempt to pull would not help."""


def pull_error(reason: str, message: str) -> ImageNotPulled | RegistryUnavailable:
    """Of an image that a machine cannot get."""
    text = f"The cluster cannot pull the image ({reason}): {message}"
    described = f"{reason} {message}".lower()
    if any(part in described for part in REFUSED_PULLS):
        return ImageNotPulled(text)
    return RegistryUnavailable(text)


class ApiError(Exception):
    """An answer of the API server that is not a success."""

    def __init__(self, status: int, reason: str, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after

    @property
    def is_quota(self) -> bool:
        return self.status == FORBIDDEN and "exceeded quota" in self.message


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise errors of the connection and of the API server as those of Atoll."""
    try:
        yield
    except ApiError as error:
        if error.is_quota:
            raise NodeFull(f"The cluster's quota is used up: {error.message}") from error
        if error.status in (UNAUTHORIZED, TOO_MANY_REQUESTS) or error.status >= 500:
            # An API server that has just started may not know its roles and keys yet.
            raise ClusterUnavailable(
                f"The Kubernetes API server does not serve Atoll now: {error.message}",
                retry_after=error.retry_after,
            ) from error
        raise ClusterRefused(f"The Kubernetes API server refused: {error.message}") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise ClusterUnavailable(f"The Kubernetes API server does not answer: {reason}") from error


@contextlib.contextmanager
def ignored(*statuses: int) -> Iterator[None]:
    """Suppress an `ApiError` with one of these statuses."""
    try:
        yield
    except ApiError as error:
        if error.status not in statuses:
            raise
