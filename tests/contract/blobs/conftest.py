"""The blob stores under test. Another store is added as another parameter."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from atoll.blobs.local import LocalBlobs
from atoll.blobs.s3 import S3Blobs
from atoll.blobs.spool import Spool
from atoll.clock import SystemClock
from atoll.testing import memory_blobs
from tests.servers.s3 import DOMAIN, S3Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.blobs.base import Blobs

S3_KINDS = ("s3", "s3-encrypted", "s3-virtual-host")
"""The last two differ in how requests are made: `test_s3_blobs.py` has what that may break."""


@pytest.fixture(params=[pytest.param("local", marks=pytest.mark.quick), "memory", "s3", "spool"])
def blobs(request: pytest.FixtureRequest, directory: Path) -> Blobs:
    if request.param == "local":
        return LocalBlobs(directory)
    if request.param in S3_KINDS:
        return on_s3(request.getfixturevalue("s3"), request.param)
    if request.param == "spool":
        server = request.getfixturevalue("s3")
        settings = server.settings(secrets.token_hex(4))
        place, clock = directory / "spool", SystemClock()
        return Spool(S3Blobs(settings), place, settings, clock, prefixes=("a/", "x/"))
    # Shared behaviour of all stores, without the precautions of local files.
    return memory_blobs()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Directory of the blobs of a test, for stores of files; it does not exist yet."""
    return tmp_path / "data" / "blobs"


def on_s3(server: S3Server, kind: str) -> S3Blobs:
    prefix = secrets.token_hex(4)
    if kind == "s3-encrypted":
        return S3Blobs(server.settings(prefix, encryption="AES256"))
    if kind == "s3-virtual-host":
        # The server is also the proxy, so that its host name needs no resolution.
        return S3Blobs(
            server.settings(
                prefix,
                endpoint=f"http://{DOMAIN}",
                path_style=False,
                proxy_url=server.endpoint,
            )
        )
    return S3Blobs(server.settings(prefix))


async def chunked(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
