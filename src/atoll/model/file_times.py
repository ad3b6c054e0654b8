"""Times of files, which user code sets to whatever the file system takes."""

from __future__ import annotations

from datetime import UTC, datetime

FIRST, LAST = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


MOST = 10**28
"""Nanoseconds: more than a kernel's 64 bits of seconds, so no file has it."""


def moment(nanoseconds: int) -> datetime:
    """
    Since 1970; what no calendar has is the last, or the first, that there is. What no file can have
    is a `ValueError`.
    """
    if abs(nanoseconds) > MOST:
        raise ValueError("not the time of a file")
    try:
        return datetime.fromtimestamp(nanoseconds // 1000 / 1e6, UTC)
    except (ValueError, OverflowError, OSError):
        return LAST if nanoseconds > 0 else FIRST
