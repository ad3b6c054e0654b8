"""Checkpoints: one a session, replaced by compare-and-set, found when they may go."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from atoll.errors import Conflict

from . import store_entities as make
from .store_entities import NOW, make_checkpoint, shared

if TYPE_CHECKING:
    from atoll.model.checkpoint import Checkpoint
    from atoll.stores.base import Store

pytestmark = pytest.mark.anyio


@shared
@given(checkpoint=make.checkpoints, later=make.checkpoints)
async def test_a_checkpoint_is_stored_unchanged(
    store: Store, checkpoint: Checkpoint, later: Checkpoint
) -> None:
    await store.checkpoints.add(checkpoint)
    assert await store.checkpoints.get(checkpoint.id) == checkpoint

    saved = await store.checkpoints.save(
        replace(later, id=checkpoint.id, version=checkpoint.version)
    )

    assert saved == replace(later, id=checkpoint.id, version=checkpoint.version + 1)
    assert await store.checkpoints.get(checkpoint.id) == saved


async def test_a_session_has_one_checkpoint(store: Store) -> None:
    checkpoint = make_checkpoint()
    await store.checkpoints.add(checkpoint)

    with pytest.raises(Conflict, match=checkpoint.id):
        await store.checkpoints.add(replace(checkpoint, number=2))

    assert await store.checkpoints.get(checkpoint.id) == checkpoint


async def test_a_save_with_an_old_version_is_refused_and_writes_nothing(store: Store) -> None:
    checkpoint = make_checkpoint()
    await store.checkpoints.add(checkpoint)
    newer = await store.checkpoints.save(replace(checkpoint, number=2))

    with pytest.raises(Conflict, match=checkpoint.id):
        await store.checkpoints.save(replace(checkpoint, number=3))
    with pytest.raises(Conflict, match="sess_none"):
        await store.checkpoints.save(make_checkpoint(id="sess_none"))

    assert await store.checkpoints.get(checkpoint.id) == newer
    assert await store.checkpoints.get("sess_none") is None


async def test_expired_checkpoints_are_listed_oldest_first(store: Store) -> None:
    kept = make_checkpoint(kept_until=None)
    due = [make_checkpoint(kept_until=NOW - timedelta(seconds=n)) for n in range(3)]
    later = make_checkpoint(kept_until=NOW + timedelta(microseconds=1))
    for checkpoint in (kept, *due, later):
        await store.checkpoints.add(checkpoint)

    assert await store.checkpoints.expired(NOW, limit=10) == due[::-1]
    assert await store.checkpoints.expired(NOW, limit=2) == [due[2], due[1]]


async def test_a_checkpoint_can_be_removed_twice(store: Store) -> None:
    checkpoint, other = make_checkpoint(), make_checkpoint()
    await store.checkpoints.add(checkpoint)
    await store.checkpoints.add(other)

    await store.checkpoints.remove(checkpoint.id)
    await store.checkpoints.remove(checkpoint.id)

    assert await store.checkpoints.get(checkpoint.id) is None
    assert await store.checkpoints.get(other.id) == other
