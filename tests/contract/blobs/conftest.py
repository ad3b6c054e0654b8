"""The blobs that the contract is held against. Another store joins with another parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from atoll.blobs.objects import LocalObjects, Objects

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.blobs.base import Blobs


@pytest.fixture(params=["local", "memory"])
def blobs(request: pytest.FixtureRequest, directory: Path) -> Blobs:
    if request.param == "local":
        return LocalObjects(directory)
    # What is common to all stores, without the care that local files take.
    from obstore.store import MemoryStore

    store = MemoryStore()
    return Objects(lambda: store, at_once=8)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the blobs of a test are, when they are files; not there yet."""
    return tmp_path / "data" / "blobs"
