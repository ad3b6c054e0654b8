"""Times of files, which user code can set to any value that the file system stores."""

from __future__ import annotations

from datetime import UTC, datetime

FIRST, LAST = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


MAX_NANOSECONDS = 10**28
"""More than 64 bits of seconds, so no file can have it."""


def file_time(nanoseconds: int) -> datetime:
    """
    A time in nanoseconds since 1970, clamped to the range of `datetime`. Raises `ValueError` for
    what no file can have.
    """
    if abs(nanoseconds) > MAX_NANOSECONDS:
        raise ValueError("not the time of a file")
    try:
        return datetime.fromtimestamp(nanoseconds // 1000 / 1e6, UTC)
    except (ValueError, OverflowError, OSError):
        return LAST if nanoseconds > 0 else FIRST
