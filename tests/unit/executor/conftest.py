"""What the tests of the executor share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import executors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def executor(bubblewrap: str, tmp_path: Path) -> Iterator[executors.Executor]:
    """Its zygote waits until somebody releases it."""
    with executors.executor(bubblewrap, tmp_path) as started:
        yield started
