"""Which URLs are of the same server."""

from __future__ import annotations

from urllib.parse import urlsplit


def origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname or "", port
