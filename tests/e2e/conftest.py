"""What the tests of the REST API share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.api import Api

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness import Server


@pytest.fixture(scope="session")
def api(server: Server) -> Iterator[Api]:
    with server.client() as http:
        yield Api(http)


@pytest.fixture
def session(api: Api) -> Iterator[str]:
    """A session's id; the session ends with the test."""
    session_id = str(api.create()["id"])
    yield session_id
    api.end(session_id)
