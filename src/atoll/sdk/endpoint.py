"""
Finds the server to use and its API key.

The URL is the argument, else ATOLL_URL; without one, the server is embedded. The key is the
argument, else ATOLL_API_KEY, else, for a server on this machine, the key file that `atoll serve`
keeps in its data directory.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from atoll.errors import InvalidRequest
from atoll.sdk.arguments import check_string

_API_PATH = "/api/v1"


@dataclass(frozen=True)
class Endpoint:
    url: str | None
    """None for the embedded server."""
    key: str | None = field(default=None, repr=False)
    key_origin: str = ""
    """A sentence for errors about where the key comes from."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the embedded server."""

    @property
    def name(self) -> str:
        return self.url or "the embedded server"

    @property
    def encrypted(self) -> bool:
        return self.url is not None and urlsplit(self.url).scheme == "https"

    @property
    def loopback(self) -> bool:
        return self.url is not None and is_loopback(self.url)


def resolve_endpoint(
    url: str | None,
    api_key: str | None,
    data_dir: str | os.PathLike[str] | None,
    settings: dict[str, Any],
) -> Endpoint:
    check_string(url=url, api_key=api_key)
    origin = "url" if url is not None else "ATOLL_URL"
    url = server_url(url)
    if url is None:
        if api_key is not None:
            raise InvalidRequest(
                "api_key needs a server: pass its url, or set ATOLL_URL.", code="no_url"
            )
        place = {} if data_dir is None else {"data_dir": Path(data_dir)}
        return Endpoint(None, settings={**settings, **place})
    if settings:
        raise InvalidRequest(
            f"{', '.join(sorted(settings))}: these settings are for an embedded server, but "
            f"{origin} selects the server {url}.",
            code="settings_need_embedded",
        )
    url = _checked(url, origin)
    key, key_origin = _find_key(url, api_key, data_dir)
    return Endpoint(url, key, key_origin)


def server_url(url: str | None) -> str | None:
    """The given URL, else ATOLL_URL; None for the embedded server."""
    return url if url is not None else os.environ.get("ATOLL_URL") or None


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _checked(url: str, origin: str) -> str:
    url = url.strip()
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise InvalidRequest(
            f"Invalid {origin}: {url!r}. Expected a URL like http://127.0.0.1:8000.",
            code="invalid_url",
        )
    return url.rstrip("/").removesuffix(_API_PATH).rstrip("/")


def _find_key(
    url: str, api_key: str | None, data_dir: str | os.PathLike[str] | None
) -> tuple[str | None, str]:
    """The key without surrounding white space, and where it comes from."""
    if key := (api_key or "").strip():
        return _allowed(key, "api_key"), "The key is from the api_key argument (--api-key)."
    if key := os.environ.get("ATOLL_API_KEY", "").strip():
        return _allowed(key, "ATOLL_API_KEY"), "The key is from ATOLL_API_KEY."
    ways = "No key was found: set ATOLL_API_KEY, or pass api_key (--api-key)."
    if not is_loopback(url):
        return None, ways
    file = _key_file(data_dir)
    try:
        key = file.read_text().strip()
    except PermissionError:
        return None, f"{ways} This user cannot read the key file {file}."
    except (OSError, UnicodeDecodeError):
        key = ""
    if key:
        return _allowed(key, str(file)), f"The key is from the file {file}."
    return None, f"{ways} There is no key file {file}."


def _key_file(data_dir: str | os.PathLike[str] | None) -> Path:
    # Imported late: loading the settings takes longer than the rest of the client.
    from atoll.settings import default_data_dir

    return Path(data_dir or os.environ.get("ATOLL_DATA_DIR") or default_data_dir()) / "key"


def _allowed(key: str, origin: str) -> str:
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequest(
            f"The API key in {origin} contains invalid characters.", code="invalid_key"
        )
    return key
