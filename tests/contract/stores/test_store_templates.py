"""Versions of templates: numbered, immutable, found by number and by status."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from atoll.errors import Conflict
from atoll.model.template import Build, TemplateStatus

from . import store_entities as make
from .store_entities import make_template, shared

if TYPE_CHECKING:
    from atoll.model.template import Template
    from atoll.stores.base import Store

pytestmark = pytest.mark.anyio

FAILED, PENDING = TemplateStatus.FAILED, TemplateStatus.PENDING


async def versions(store: Store, count: int) -> list[Template]:
    """So many versions of one template, oldest first."""
    newest = make_template(name="1")
    await store.templates.add(newest)
    made = [newest]
    for n in range(2, count + 1):
        newest = await store.templates.supersede(newest, replace(newest, name=str(n)))
        made.append(newest)
    return made


@shared
@given(first=make.templates, second=make.templates)
async def test_every_version_is_stored_unchanged(
    store: Store, first: Template, second: Template
) -> None:
    await store.templates.add(first)

    newer = await store.templates.supersede(first, replace(second, id=first.id))

    assert newer == replace(second, id=first.id, number=first.number + 1, version=2)
    assert await store.templates.get(first.id) == newer
    assert await store.templates.numbered(first.id, first.number) == first
    assert await store.templates.numbered(first.id, first.number + 1) == newer
    assert await store.templates.numbered(first.id, first.number + 2) is None


async def test_a_version_is_stored_with_the_given_fields(store: Store) -> None:
    first = make_template(status=PENDING, build=Build(python_packages=("a",)))
    await store.templates.add(first)
    given_up = replace(first, status=FAILED, build=Build(message="There is a newer one."))

    await store.templates.supersede(given_up, replace(first, name="2"))

    assert await store.templates.numbered(first.id, 1) == given_up


async def test_only_one_of_two_concurrent_successors_of_a_version_is_stored(store: Store) -> None:
    first = make_template()
    await store.templates.add(first)

    answers = await asyncio.gather(
        *(store.templates.supersede(first, replace(first, name=str(n))) for n in range(4)),
        return_exceptions=True,
    )

    (won,) = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert all(isinstance(answer, Conflict) for answer in answers if answer is not won)
    assert await store.templates.get(first.id) == won
    assert await store.templates.before(first.id) == [first]


async def test_versions_are_listed_newest_first_below_a_number(store: Store) -> None:
    made = await versions(store, 5)
    await versions(store, 2)

    first = await store.templates.before(made[0].id, limit=2)
    rest = await store.templates.before(made[0].id, number=first[-1].number, limit=9)

    assert first + rest == made[-2::-1]


async def test_the_newest_ready_version_is_found(store: Store) -> None:
    first, second = await versions(store, 2)
    assert await store.templates.ready(first.id) == second

    broken = await store.templates.supersede(second, replace(second, status=FAILED))
    await store.templates.supersede(broken, replace(second, status=PENDING))
    assert await store.templates.ready(first.id) == second

    never = make_template(status=PENDING)
    await store.templates.add(never)
    assert await store.templates.ready(never.id) is None
    assert await store.templates.ready("nobody") is None


async def test_pending_builds_are_listed_in_order(store: Store) -> None:
    waiting = [make_template(id=f"t{n}", status=PENDING) for n in range(3)]
    building = make_template(id="t9", status=TemplateStatus.BUILDING)
    for template in (*waiting, building, make_template(), make_template(status=FAILED)):
        await store.templates.add(template)

    assert await store.templates.unbuilt(limit=2) == waiting[:2]
    assert await store.templates.unbuilt(limit=9, after="t1") == [waiting[2], building]


async def test_any_version_but_the_newest_can_be_dropped_twice(store: Store) -> None:
    made = await versions(store, 3)

    for number in (1, 1, 3):
        await store.templates.drop(made[0].id, number)

    assert await store.templates.before(made[0].id) == [made[1]]
    assert await store.templates.get(made[0].id) == made[2]


async def test_removing_a_template_removes_its_versions(store: Store) -> None:
    made = await versions(store, 3)
    other = await versions(store, 2)

    assert await store.templates.remove(made[0].id)

    assert await store.templates.before(made[0].id) == []
    assert await store.templates.numbered(made[0].id, 1) is None
    assert await store.templates.before(other[0].id) == [other[0]]
    await store.templates.add(made[0])
    assert await store.templates.supersede(made[0], made[0])
