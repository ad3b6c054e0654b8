"""
Which server is meant, and with which key.

The key is the argument, else ATOLL_API_KEY, else, for a server on this machine, the one that
`atoll serve` keeps in its data directory. No server named means: the one inside this process.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from atoll.errors import InvalidRequest


@dataclass(frozen=True)
class Target:
    url: str | None
    """None for the embedded server."""
    key: str | None = field(default=None, repr=False)
    settings: dict[str, Any] = field(default_factory=dict)
    """For the embedded server."""

    @property
    def name(self) -> str:
        return self.url or "the embedded server"

    @property
    def encrypted(self) -> bool:
        return self.url is not None and urlsplit(self.url).scheme == "https"

    @property
    def loopback(self) -> bool:
        return self.url is not None and is_loopback(self.url)


def find(
    url: str | None,
    api_key: str | None,
    data_dir: str | os.PathLike[str] | None,
    settings: dict[str, Any],
) -> Target:
    origin = "url" if url is not None else "ATOLL_URL"
    url = url if url is not None else os.environ.get("ATOLL_URL") or None
    if url is None:
        if api_key is not None:
            raise InvalidRequest(
                "api_key is for a server: give its url, or set ATOLL_URL.", code="no_url"
            )
        place = {} if data_dir is None else {"data_dir": Path(data_dir)}
        return Target(None, settings={**settings, **place})
    if settings:
        raise InvalidRequest(
            f"{', '.join(sorted(settings))}: these settings are for the embedded server, but "
            f"{origin} names one that runs by itself ({url}).",
            code="settings_need_embedded",
        )
    url = _checked(url, origin)
    key = api_key or os.environ.get("ATOLL_API_KEY") or None
    if key is None and is_loopback(url):
        key = _kept_key(data_dir)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InvalidRequest("The API key has characters that no key has.", code="invalid_key")
    return Target(url, key)


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _checked(url: str, origin: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise InvalidRequest(
            f"{origin} is {url!r}; write it like http://127.0.0.1:8000", code="invalid_url"
        )
    return url.rstrip("/")


def _kept_key(data_dir: str | os.PathLike[str] | None) -> str | None:
    # Late: the settings take longer to load than the rest of the client.
    from atoll.settings import default_data_dir

    place = Path(data_dir or os.environ.get("ATOLL_DATA_DIR") or default_data_dir())
    try:
        return (place / "key").read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None
