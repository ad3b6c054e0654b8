"""Volumes: by name, listed newest first."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from atoll.errors import Conflict

from . import store_entities as make
from .store_entities import NOW, make_volume, shared, walk

if TYPE_CHECKING:
    from atoll.model.volume import Volume
    from atoll.stores.base import Store

pytestmark = pytest.mark.anyio


@shared
@given(volume=make.volumes)
async def test_a_volume_is_stored_unchanged(store: Store, volume: Volume) -> None:
    await store.volumes.add(volume)

    assert await store.volumes.get(volume.id) == volume


async def test_a_used_name_is_refused_and_changes_nothing(store: Store) -> None:
    volume = make_volume()
    await store.volumes.add(volume)

    with pytest.raises(Conflict, match=volume.id):
        await store.volumes.add(replace(volume, kind="s3", node_id=None))

    assert await store.volumes.get(volume.id) == volume
    assert await store.volumes.get("vol-none") is None


async def test_remove_returns_whether_it_existed(store: Store) -> None:
    volume = make_volume()
    await store.volumes.add(volume)

    assert await store.volumes.remove(volume.id) is True
    assert await store.volumes.remove(volume.id) is False

    assert await store.volumes.get(volume.id) is None


async def test_pages_contain_every_volume_once_newest_first(store: Store) -> None:
    """Two share each moment: the order is still total."""
    volumes = [make_volume(created_at=NOW + timedelta(microseconds=n // 2)) for n in range(7)]
    for volume in volumes:
        await store.volumes.add(volume)

    got = await walk(store.volumes.page, 2)

    assert got == sorted(volumes, key=lambda found: (found.created_at, found.id), reverse=True)


async def test_a_cursor_stays_valid_while_volumes_are_added_and_removed(store: Store) -> None:
    volumes = [make_volume(created_at=NOW + timedelta(seconds=n)) for n in range(4)]
    for volume in volumes:
        await store.volumes.add(volume)
    first = await store.volumes.page(limit=2)

    await store.volumes.remove(first.items[-1].id)
    await store.volumes.add(make_volume(created_at=NOW + timedelta(seconds=9)))
    second = await store.volumes.page(limit=2, cursor=first.next_cursor)

    assert second.items == (volumes[1], volumes[0])
    assert second.next_cursor is None
