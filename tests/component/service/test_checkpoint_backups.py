"""Backups that are damaged, missing, on their way or read through."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING

import pytest

from atoll.errors import NotFound, PermanentError, TemporaryError
from atoll.model.checkpoint import CheckpointRef, retained
from tests.component.service.test_checkpoints import MEGABYTE, SESSION, Ground, made, tree
from tests.contract.stores.store_entities import NOW

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.link.client import Link

pytestmark = pytest.mark.anyio


@pytest.fixture
async def ground(tmp_path: Path, bubblewrap: str) -> AsyncIterator[Ground]:
    async with made(tmp_path, bubblewrap) as ground:
        yield ground


async def saved(ground: Ground) -> tuple[Path, Link]:
    workspace, link = await ground.node("one")
    for number in range(3):
        content = random.Random(number).randbytes(MEGABYTE)
        (workspace / f"large {number}").write_bytes(content)
    (workspace / "small").write_text("small")
    await ground.checkpoints.take(SESSION, link)
    return workspace, link


async def test_a_complete_backup_is_verified(ground: Ground) -> None:
    await saved(ground)

    verified = await ground.checkpoints.verify(SESSION)

    assert verified == await ground.checkpoints.get(SESSION)
    assert await ground.checkpoints.is_synced(SESSION)


async def test_a_missing_backup_cannot_be_verified(ground: Ground) -> None:
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
async def test_every_changed_object_and_page_is_detected(ground: Ground, how: str) -> None:
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


def data(ground: Ground) -> set[Path]:
    return set(ground.blobs.glob("*/*/data/*"))


async def two(ground: Ground) -> tuple[Path, Link, set[Path], dict[str, tuple[object, ...]]]:
    """Two backups; what only the second has, and the tree of the first."""
    workspace, link = await ground.node("one")
    (workspace / "shared").write_bytes(random.Random(1).randbytes(MEGABYTE))
    (workspace / "file").write_bytes(random.Random(2).randbytes(MEGABYTE))
    (workspace / "only in the first").write_text("x")
    await ground.checkpoints.take(SESSION, link)
    first, before = tree(workspace), data(ground)
    (workspace / "file").write_bytes(random.Random(3).randbytes(MEGABYTE))
    (workspace / "only in the first").unlink()
    (workspace / "a new one").write_text("y")
    await ground.checkpoints.take(SESSION, link)
    return workspace, link, data(ground) - before, first


@pytest.mark.slow
@pytest.mark.parametrize("how", HARM)
async def test_the_previous_backup_is_restored_when_the_newest_is_damaged(
    ground: Ground, how: str
) -> None:
    workspace, link, only, first = await two(ground)
    manifest = max(ground.blobs.glob("*/*/manifests/*"))
    for number, path in enumerate([manifest, *sorted(only)]):
        kept = path.read_bytes()
        harm(path, how)
        restored = await ground.restored(f"{number}")
        assert tree(restored) == first, "all of it, and nothing of the other"
        assert ground.last is not None
        assert (ground.last.backup.number, ground.last.older) == (1, True)
        path.write_bytes(kept)
    # All objects exist again, but that cannot be known: the next save relies on none of them.
    assert tree(await ground.restored("whole")) == tree(workspace)
    harm(sorted(only)[0], how)
    await ground.checkpoints.take(SESSION, link)
    await ground.checkpoints.verify(SESSION)
    assert tree(await ground.restored("after")) == tree(workspace)
    assert ground.last is not None
    assert (ground.last.backup.number, ground.last.older) == (3, False)


async def test_an_error_reports_that_no_backup_is_complete(ground: Ground) -> None:
    workspace, link, _, _ = await two(ground)
    for path in data(ground):
        harm(path, "flipped")

    with pytest.raises(PermanentError) as refused:
        await ground.restored("two")
    assert refused.value.code == "checkpoint_damaged"

    # The workspace is on its node still: the next save makes all good.
    await ground.checkpoints.take(SESSION, link)
    await ground.checkpoints.verify(SESSION)
    assert tree(await ground.restored("three")) == tree(workspace)


async def test_damaged_objects_are_stored_again_by_the_next_save(
    ground: Ground,
) -> None:
    workspace, link = await saved(ground)
    harm(max(data(ground), key=lambda path: path.stat().st_size), "flipped")
    with pytest.raises(PermanentError):
        await ground.checkpoints.verify(SESSION)

    await ground.checkpoints.take(SESSION, link)

    await ground.checkpoints.verify(SESSION)
    assert tree(await ground.restored("two")) == tree(workspace)


@pytest.mark.slow
async def test_the_configured_number_of_backups_is_kept_and_shares_unchanged_data(
    tmp_path: Path, bubblewrap: str
) -> None:
    async with made(tmp_path, bubblewrap, backups=3) as ground:
        workspace, link = await ground.node("one")
        (workspace / "large").write_bytes(random.Random(1).randbytes(4 * MEGABYTE))
        trees = []
        for number in range(6):
            (workspace / "file").write_text(f"{number}")
            # Code runs during every other one.
            quiet = functools.partial(bool, number % 2)
            await ground.checkpoints.take(SESSION, link, quiet=quiet)
            trees.append(tree(workspace))
        last = await ground.checkpoints.get(SESSION)
        assert last is not None
        assert [one.number for one in last.backups] == [6, 5, 4, 2]
        assert sum(ground.objects().values()) < 4.2 * MEGABYTE
        manifests = sorted(ground.blobs.glob("*/*/manifests/*"))
        assert len(manifests) == 4
        for manifest, expected in zip(manifests[::-1], (5, 4, 3, 1), strict=True):
            assert tree(await ground.restored(f"{expected}")) == trees[expected]
            manifest.unlink()


CASES = {
    "none before": ([], True, 2, []),
    "the last stays for its readers": ([(1, True)], True, 1, [1]),
    "enough": ([(3, True), (2, True), (1, True)], True, 2, [3]),
    "one that is not settled does not count": ([(3, False), (2, True), (1, True)], True, 2, [3, 2]),
    "nor the new one": ([(3, False), (2, False), (1, True)], False, 2, [3, 1]),
    "many": ([(4, True), (3, True), (2, False), (1, True)], True, 4, [4, 3, 1]),
}


@pytest.mark.parametrize(("given", "settled", "backups", "stay"), CASES.values(), ids=CASES.keys())
async def test_older_backups_are_retained_by_the_rules(
    given: list[tuple[int, bool]], settled: bool, backups: int, stay: list[int]
) -> None:
    candidates = [CheckpointRef(n, f"m{n}", NOW, 0, 0, "node", of) for n, of in given]

    kept = retained(candidates, settled=settled, backups=backups)

    assert [one.number for one in kept] == stay


async def test_a_save_interrupted_at_any_put_keeps_the_last_backup_complete(
    ground: Ground,
) -> None:
    workspace, link, _, _ = await two(ground)
    expected = tree(workspace)
    for number in range(3):
        (workspace / f"more {number}").write_bytes(random.Random(number).randbytes(MEGABYTE))
    puts, broken = ground.breaking, 0
    while True:
        puts.left = broken
        try:
            await ground.checkpoints.take(SESSION, link)
            break
        except TemporaryError:
            broken += 1
        puts.left = None
        await ground.checkpoints.verify(SESSION)
        assert tree(await ground.restored(f"after {broken}")) == expected
    puts.left = None
    assert broken > 3
    assert tree(await ground.restored("last")) == tree(workspace)
