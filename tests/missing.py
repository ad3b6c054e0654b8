"""What a machine lacks is a skip on a laptop, and a failure where CI runs all tests."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

REQUIRED = "TEST_REQUIRE_ALL"
"""Set by `tests.run` where nothing may be missing."""


def missing(reason: str) -> NoReturn:
    """Skip the test, or fail it where nothing may be missing."""
    if os.environ.get(REQUIRED):
        pytest.fail(reason)
    pytest.skip(reason)
