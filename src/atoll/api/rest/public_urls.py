"""Absolute URLs of this server, as its clients reach it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.api.rest import host_header
from atoll.api.rest.services import services_of
from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    from starlette.requests import Request


def absolute_url(request: Request, url: str) -> str:
    """Raises `InvalidRequest` if the server cannot know its public address."""
    found = absolute_url_or_none(request, url)
    if found is None:
        raise InvalidRequest(
            "Cannot create a link: the request's Host header is not a name of this server. "
            "Set ATOLL_PUBLIC_URL, or add the host to ATOLL_TRUSTED_HOSTS.",
            code="public_url_needed",
        )
    return found


def absolute_url_or_none(request: Request, url: str) -> str | None:
    if not url.startswith("/"):
        return url
    settings = services_of(request).settings
    if settings.public_url is not None:
        return settings.public_url.rstrip("/") + url
    if not host_header.is_trusted(request.scope, settings.trusted_hosts):
        return None
    return str(request.base_url).rstrip("/") + url
