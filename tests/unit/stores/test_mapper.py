"""Rows follow from the dataclass and the table: no code names their fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

import pytest

from atoll.stores.sql import (
    api_keys,
    checkpoints,
    events,
    executions,
    idempotency_records,
    instances,
    nodes,
    sessions,
    tables,
    templates,
    volumes,
    webhooks,
)
from atoll.stores.sql.columns import Column, Table
from atoll.stores.sql.mapper import Mapper
from atoll.stores.sql.tables import BIGINT, ID, INTEGER, JSON, TIME, WORD

NOW = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
MICROS = 1_772_366_400_123_456
MAPPERS = [
    module.MAPPER
    for module in (
        checkpoints, events, executions, idempotency_records, instances, api_keys, nodes,
        sessions, templates, volumes, webhooks,
    )
]  # fmt: skip


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Size:
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Part:
    made_at: datetime
    colours: tuple[Colour, ...] = ()


@dataclass(frozen=True, slots=True)
class Thing:
    id: str
    colour: Colour
    size: Size
    made_at: datetime
    gone_at: datetime | None = None
    done: bool = False
    note: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    tags: frozenset[str] = frozenset()
    extra: int = 3
    version: int = 1


THINGS = Table(
    "things",
    Column("id", ID, primary_key=True),
    Column("colour", WORD),
    Column("width", INTEGER),
    Column("height", INTEGER),
    Column("made_at", TIME),
    Column("gone_at", TIME, null=True),
    Column("done", INTEGER),
    Column("note", JSON, null=True),
    Column("labels", JSON, null=True),
    Column("parts", JSON),
    Column("others", JSON),
    Column("version", BIGINT),
)
MAPPER = Mapper(Thing, THINGS, rest="others")
PLAIN = Thing("t1", Colour.RED, Size(3, 4), NOW)
PLAIN_ROW = {
    "id": "t1", "colour": "red", "width": 3, "height": 4, "made_at": MICROS, "gone_at": None,
    "done": 0, "note": None, "labels": None, "parts": "[]", "others": '{"tags":[],"extra":3}',
    "version": 1,
}  # fmt: skip
FULL = Thing(
    "t2", Colour.RED, Size(3, 4), NOW, NOW, True, 'a "note"\0', {"a": "b"},
    (Part(NOW, (Colour.RED,)),), frozenset({"y", "x"}), 5, 7,
)  # fmt: skip
FULL_ROW = {
    "id": "t2", "colour": "red", "width": 3, "height": 4, "made_at": MICROS, "gone_at": MICROS,
    "done": 1, "note": '"a \\"note\\"\\u0000"', "labels": '{"a":"b"}',
    "parts": f'[{{"made_at":{MICROS},"colours":["red"]}}]',
    "others": '{"tags":["x","y"],"extra":5}', "version": 7,
}  # fmt: skip


@pytest.mark.parametrize(
    ("thing", "row"), [(PLAIN, PLAIN_ROW), (FULL, FULL_ROW)], ids=["plain", "full"]
)
def test_an_entity_becomes_a_row_and_the_row_the_entity(
    thing: Thing, row: dict[str, object]
) -> None:
    assert MAPPER.row(thing) == row
    assert MAPPER.entity(row) == thing
    assert type(MAPPER.entity(row).colour) is Colour


def test_a_null_reads_as_a_fresh_default() -> None:
    first, second = MAPPER.entity(PLAIN_ROW), MAPPER.entity(PLAIN_ROW)

    assert first.labels == {}
    assert first.labels is not second.labels


def test_unknown_fields_are_ignored_and_missing_ones_have_their_default() -> None:
    thing = MAPPER.entity({**PLAIN_ROW, "others": '{"tags":["x"],"from_the_future":1}'})

    assert (set(thing.tags), thing.extra) == ({"x"}, 3)


def test_part_of_a_row_has_the_same_values() -> None:
    assert MAPPER.part(["id", "gone_at", "version"])(FULL) == {
        name: FULL_ROW[name] for name in ("id", "gone_at", "version")
    }


def test_statements_name_every_column() -> None:
    assert MAPPER.insert.count(":") == len(THINGS.columns)
    assert MAPPER.update(["id", "colour", "gone_at", "version"]) == (
        "UPDATE things SET colour = :colour, gone_at = :gone_at, version = :version + 1 "
        "WHERE id = :id AND version = :version"
    )


def test_a_field_without_a_column_is_an_error_at_import() -> None:
    with pytest.raises(TypeError, match="things has no columns for tags, extra"):
        Mapper(Thing, THINGS)


def test_every_column_of_every_table_is_written() -> None:
    written = {mapper.table.name: set(mapper.columns) for mapper in MAPPERS}
    others = {
        "events": {"id"},  # The database assigns it.
        "nodes": {"problem"},  # Other nodes write it.
    }

    for table in tables.TABLES:
        if table.name in written:
            expected = table.columns.keys() - others.get(table.name, set())
            assert written[table.name] == expected, table.name
    assert {table.name for table in tables.TABLES} - written.keys() == {
        "properties",
        "template_versions",
    }
