"""Build logs after an attacker has written to the blob store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from atoll.blobs.local import LocalBlobs
from atoll.service.templates.build_logs import MAX_READ, BuildLogs
from tests.contract.stores.store_entities import make_template

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("stored", "begin", "data"),
    [
        pytest.param(b"7\ntwo\nlines", 7, b"two\nlines", id="a log"),
        pytest.param(b"", 0, b"", id="nothing"),
        pytest.param(b"no number\nx", 0, b"", id="no number"),
        pytest.param(b"-5\nx", 0, b"", id="negative"),
        pytest.param(b"9" * 5000 + b"\nx", 0, b"", id="a number of 5000 digits"),
        pytest.param(b"0\n" + bytes(MAX_READ), 0, b"", id="too large"),
    ],
)
async def test_invalid_data_in_the_blob_store_is_read_as_an_empty_log(
    tmp_path: Path, stored: bytes, begin: int, data: bytes
) -> None:
    blobs, template = LocalBlobs(tmp_path), make_template()
    await blobs.put(f"templates/{template.id}/{template.number}.log", stored)
    found = await BuildLogs(blobs, 1024).read(template)
    assert (found.begin, bytes(found.data)) == (begin, data)
