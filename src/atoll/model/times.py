"""Times of files, which user code sets to whatever the file system takes."""

from __future__ import annotations

from datetime import UTC, datetime

FIRST, LAST = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


def moment(nanoseconds: int) -> datetime:
    """Since 1970; what no calendar has is the last, or the first, that there is."""
    try:
        return datetime.fromtimestamp(nanoseconds // 1000 / 1e6, UTC)
    except (ValueError, OverflowError, OSError):
        return LAST if nanoseconds > 0 else FIRST
