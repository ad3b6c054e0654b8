"""Times of files are reported, whatever their value."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from atoll.model.file_times import FIRST, LAST, file_time


@pytest.mark.parametrize(
    ("nanoseconds", "expected"),
    [
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
        (1_500, datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC)),
        (10**9 * 253_402_300_800, LAST),
        (2**63 * 10**9, LAST),
        (-(10**9) * 62_135_596_801, FIRST),
        (-(2**63) * 10**9, FIRST),
    ],
)
def test_an_impossible_time_becomes_the_nearest_valid_one(
    nanoseconds: int, expected: datetime
) -> None:
    assert file_time(nanoseconds) == expected
