"""Backups that are damaged, missing, on their way or read through."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from atoll.errors import NotFound, PermanentError
from tests.unit.service.test_checkpoints import MEGABYTE, SESSION, Ground, made

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
async def ground(tmp_path: Path, bubblewrap: str) -> AsyncIterator[Ground]:
    async with made(tmp_path, bubblewrap) as ground:
        yield ground


async def saved(ground: Ground) -> Path:
    workspace, link = await ground.node("one")
    for number in range(3):
        content = random.Random(number).randbytes(MEGABYTE)
        (workspace / f"large {number}").write_bytes(content)
    (workspace / "small").write_text("small")
    await ground.checkpoints.take(SESSION, link)
    return workspace


async def test_what_is_whole_is_verified(ground: Ground) -> None:
    await saved(ground)

    verified = await ground.checkpoints.verify(SESSION)

    assert verified == await ground.checkpoints.get(SESSION)
    assert await ground.checkpoints.is_home(SESSION)


async def test_what_was_never_saved_cannot_be_verified(ground: Ground) -> None:
    with pytest.raises(NotFound) as refused:
        await ground.checkpoints.verify(SESSION)
    assert refused.value.code == "checkpoint_not_found"


HARM = ["flipped", "cut", "longer", "gone", "another's"]


def harm(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
    elif how == "cut":
        del data[-1:]
    elif how == "longer":
        data += b"x"
    elif how == "another's":
        data = bytearray(random.Random(9).randbytes(len(data)))
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data)


@pytest.mark.parametrize("how", HARM)
async def test_each_object_and_page_that_is_not_as_it_was_is_found(
    ground: Ground, how: str
) -> None:
    await saved(ground)
    for path in list(ground.blobs.glob("*/*/data/*")):
        kept = path.read_bytes()
        harm(path, how)
        with pytest.raises(PermanentError) as refused:
            await ground.checkpoints.verify(SESSION)
        assert refused.value.code == "checkpoint_damaged"
        assert path.name in refused.value.message
        path.write_bytes(kept)
    await ground.checkpoints.verify(SESSION)
