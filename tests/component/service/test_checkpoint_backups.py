"""Backups that are damaged, missing, on their way or read through."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING

import pytest

from atoll.errors import NotFound, PermanentError, TemporaryError
from atoll.model.checkpoint import CheckpointRef, retained
from tests.component.service.test_checkpoints import MEGABYTE, SESSION, Environment, made, tree
from tests.contract.stores.store_entities import NOW

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.link.client import Link

pytestmark = pytest.mark.anyio


@pytest.fixture
async def environment(tmp_path: Path, bubblewrap: str) -> AsyncIterator[Environment]:
    async with made(tmp_path, bubblewrap) as environment:
        yield environment


async def saved(environment: Environment) -> tuple[Path, Link]:
    workspace, link = await environment.node("one")
    for number in range(3):
        content = random.Random(number).randbytes(MEGABYTE)
        (workspace / f"large {number}").write_bytes(content)
    (workspace / "small").write_text("small")
    await environment.checkpoints.take(SESSION, link)
    return workspace, link


async def test_a_complete_backup_is_verified(environment: Environment) -> None:
    await saved(environment)

    verified = await environment.checkpoints.verify(SESSION)

    assert verified == await environment.checkpoints.get(SESSION)
    assert await environment.checkpoints.is_synced(SESSION)


async def test_a_missing_backup_cannot_be_verified(environment: Environment) -> None:
    with pytest.raises(NotFound) as refused:
        await environment.checkpoints.verify(SESSION)
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
async def test_every_changed_object_and_page_is_detected(
    environment: Environment, how: str
) -> None:
    await saved(environment)
    for path in list(environment.blobs.glob("*/*/data/*")):
        kept = path.read_bytes()
        harm(path, how)
        with pytest.raises(PermanentError) as refused:
            await environment.checkpoints.verify(SESSION)
        assert refused.value.code == "checkpoint_damaged"
        assert path.name in refused.value.message
        path.write_bytes(kept)
    await environment.checkpoints.verify(SESSION)


def data(environment: Environment) -> set[Path]:
    return set(environment.blobs.glob("*/*/data/*"))


async def two(
    environment: Environment,
) -> tuple[Path, Link, set[Path], dict[str, tuple[object, ...]]]:
    """Two backups; what only the second has, and the tree of the first."""
    workspace, link = await environment.node("one")
    (workspace / "shared").write_bytes(random.Random(1).randbytes(MEGABYTE))
    (workspace / "file").write_bytes(random.Random(2).randbytes(MEGABYTE))
    (workspace / "only in the first").write_text("x")
    await environment.checkpoints.take(SESSION, link)
    first, before = tree(workspace), data(environment)
    (workspace / "file").write_bytes(random.Random(3).randbytes(MEGABYTE))
    (workspace / "only in the first").unlink()
    (workspace / "a new one").write_text("y")
    await environment.checkpoints.take(SESSION, link)
    return workspace, link, data(environment) - before, first


@pytest.mark.slow
@pytest.mark.parametrize("how", HARM)
async def test_the_previous_backup_is_restored_when_the_newest_is_damaged(
    environment: Environment, how: str
) -> None:
    workspace, link, only, first = await two(environment)
    manifest = max(environment.blobs.glob("*/*/manifests/*"))
    for number, path in enumerate([manifest, *sorted(only)]):
        kept = path.read_bytes()
        harm(path, how)
        restored = await environment.restored(f"{number}")
        assert tree(restored) == first, "all of it, and nothing of the other"
        assert environment.last is not None
        assert (environment.last.backup.number, environment.last.older) == (1, True)
        path.write_bytes(kept)
    # All objects exist again, but that cannot be known: the next save relies on none of them.
    assert tree(await environment.restored("whole")) == tree(workspace)
    harm(sorted(only)[0], how)
    await environment.checkpoints.take(SESSION, link)
    await environment.checkpoints.verify(SESSION)
    assert tree(await environment.restored("after")) == tree(workspace)
    assert environment.last is not None
    assert (environment.last.backup.number, environment.last.older) == (3, False)


async def test_an_error_reports_that_no_backup_is_complete(environment: Environment) -> None:
    workspace, link, _, _ = await two(environment)
    for path in data(environment):
        harm(path, "flipped")

    with pytest.raises(PermanentError) as refused:
        await environment.restored("two")
    assert refused.value.code == "checkpoint_damaged"

    # The workspace is on its node still: the next save makes all good.
    await environment.checkpoints.take(SESSION, link)
    await environment.checkpoints.verify(SESSION)
    assert tree(await environment.restored("three")) == tree(workspace)


async def test_damaged_objects_are_stored_again_by_the_next_save(
    environment: Environment,
) -> None:
    workspace, link = await saved(environment)
    harm(max(data(environment), key=lambda path: path.stat().st_size), "flipped")
    with pytest.raises(PermanentError):
        await environment.checkpoints.verify(SESSION)

    await environment.checkpoints.take(SESSION, link)

    await environment.checkpoints.verify(SESSION)
    assert tree(await environment.restored("two")) == tree(workspace)


@pytest.mark.slow
async def test_the_configured_number_of_backups_is_kept_and_shares_unchanged_data(
    tmp_path: Path, bubblewrap: str
) -> None:
    async with made(tmp_path, bubblewrap, backups=3) as environment:
        workspace, link = await environment.node("one")
        (workspace / "large").write_bytes(random.Random(1).randbytes(4 * MEGABYTE))
        trees = []
        for number in range(6):
            (workspace / "file").write_text(f"{number}")
            # Code runs during every other one.
            quiet = functools.partial(bool, number % 2)
            await environment.checkpoints.take(SESSION, link, quiet=quiet)
            trees.append(tree(workspace))
        last = await environment.checkpoints.get(SESSION)
        assert last is not None
        assert [one.number for one in last.backups] == [6, 5, 4, 2]
        assert sum(environment.objects().values()) < 4.2 * MEGABYTE
        manifests = sorted(environment.blobs.glob("*/*/manifests/*"))
        assert len(manifests) == 4
        for manifest, expected in zip(manifests[::-1], (5, 4, 3, 1), strict=True):
            assert tree(await environment.restored(f"{expected}")) == trees[expected]
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
    environment: Environment,
) -> None:
    workspace, link, _, _ = await two(environment)
    expected = tree(workspace)
    for number in range(3):
        (workspace / f"more {number}").write_bytes(random.Random(number).randbytes(MEGABYTE))
    puts, broken = environment.breaking, 0
    while True:
        puts.left = broken
        try:
            await environment.checkpoints.take(SESSION, link)
            break
        except TemporaryError:
            broken += 1
        puts.left = None
        await environment.checkpoints.verify(SESSION)
        assert tree(await environment.restored(f"after {broken}")) == expected
    puts.left = None
    assert broken > 3
    assert tree(await environment.restored("last")) == tree(workspace)
