"""What the tests of the executor share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import executors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def executor(bubblewrap: str, tmp_path: Path) -> AsyncIterator[executors.Executor]:
    """Its zygote waits until a test releases it."""
    with executors.executor(bubblewrap, tmp_path) as started:
        yield started
    await started.disconnect()
