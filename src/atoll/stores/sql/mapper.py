"""
Rows from entities and entities from rows, derived from the dataclass and the table.

A field is stored in the column of its name, encoded as the column's type asks: times as
microseconds, enums by their values, anything else that is not plain in a JSON column. If there is
no such column,

- a field whose dataclass has its fields as columns is stored in these (`resources` in `cpu`,
  `memory`, …);
- any other is stored in the JSON object of the column `rest`.

A column that may be null where the field may not is null instead of the field's default, which is
how rows look that were written before there was the column.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from enum import Enum
from operator import attrgetter, itemgetter
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

from atoll.model.fields import FieldInfo, fields_of
from atoll.stores.sql import json_codec
from atoll.stores.sql.columns import Column, Storage, Table
from atoll.stores.sql.json_codec import ObjectCodec, decode, encode, micros, moment

if TYPE_CHECKING:
    from atoll.stores.sql.engine import Row

Values = dict[str, Any]


class Entity(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


E = TypeVar("E", bound=Entity)
Convert = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Special(Generic[E]):
    """Columns and fields that the rules do not cover."""

    columns: Collection[str] = ()
    write: Callable[[E], Values] = lambda _: {}
    """Makes these columns."""
    fields: Collection[str] = ()
    read: Callable[[Row], Values] = lambda _: {}
    """Makes these fields."""
    in_rest: Collection[str] = ()
    """Fields that are stored in `rest` though the table has columns of their names."""
    never_null: Collection[str] = ()
    """Columns that replicas of an earlier version do not expect to be null, though they may be."""


class Mapper(Generic[E]):
    def __init__(
        self,
        entity: type[E],
        table: Table,
        *,
        columns: Mapping[str, str] | None = None,
        rest: str | None = None,
        special: Special[E] | None = None,
    ) -> None:
        """`columns` has the columns of fields that are named otherwise."""
        self._entity = entity
        self.table = table
        self._special = special or Special()
        self._paths: dict[str, str] = {}
        self._encoders: dict[str, Convert] = {}
        self._fields: dict[str, str] = {}
        self._decoders: list[tuple[str, Convert]] = []
        self._defaults: list[tuple[str, Callable[[], Any]]] = []
        self._embedded: dict[str, tuple[Convert, Convert]] = {}
        others: list[str] = []
        for field in fields_of(entity).values():
            column = table.columns.get((columns or {}).get(field.name, field.name))
            if field.name in self._special.in_rest:
                others.append(field.name)
            elif column is not None:
                self._add(column, field)
            elif _is_embedded(field, table):
                self._embed(field)
            elif field.name not in self._special.fields:
                others.append(field.name)
        if others and rest is None:
            raise TypeError(f"{table.name} has no columns for {', '.join(others)}")
        self._rest = rest
        self._others = ObjectCodec(entity, others)
        self._get: Convert = itemgetter(*self._fields.values())
        written = {*self._paths, *self._special.columns, rest}
        self.columns = tuple(name for name in table.columns if name in written)
        """The columns that `row` fills."""
        self.row: Callable[[E], Values] = self.part(self.columns)

    def _add(self, column: Column, field: FieldInfo) -> None:
        if column.name not in self._special.columns:
            self._paths[column.name] = field.name
            null = column.null and column.name not in self._special.never_null
            if encoder := _encoder(column, field, null=null):
                self._encoders[column.name] = encoder
        if field.name not in self._special.fields:
            self._fields[field.name] = column.name
            if decoder := _decoder(column, _without_none(field.type)):
                self._decoders.append((field.name, decoder))
            if column.null and not _may_be_none(field.type) and field.make_default is not None:
                self._defaults.append((field.name, field.make_default))

    def _embed(self, field: FieldInfo) -> None:
        names = list(fields_of(field.type))
        for name in names:
            self._paths[name] = f"{field.name}.{name}"
        self._embedded[field.name] = field.type, itemgetter(*names)

    def part(self, columns: Collection[str]) -> Callable[[E], Values]:
        """Makes rows of these columns alone."""
        names = [name for name in columns if name in self._paths]
        get: Convert = attrgetter(*(self._paths[name] for name in names))
        encoders = [(name, self._encoders[name]) for name in names if name in self._encoders]
        special = self._special.write if set(columns) & set(self._special.columns) else None
        rest = self._rest if self._rest in columns else None

        def row(entity: E) -> Values:
            values: Values = dict(zip(names, get(entity), strict=True))
            for name, encoder in encoders:
                if (value := values[name]) is not None:
                    values[name] = encoder(value)
            if rest is not None:
                values[rest] = encode(self._others.write(entity))
            if special is not None:
                values |= special(entity)
            return values

        return row

    def entity(self, row: Row) -> E:
        values: Values = dict(zip(self._fields, self._get(row), strict=True))
        for name, decoder in self._decoders:
            if (value := values[name]) is not None:
                values[name] = decoder(value)
        for name, make_default in self._defaults:
            if values[name] is None:
                values[name] = make_default()
        for name, (kind, get) in self._embedded.items():
            values[name] = kind(*get(row))
        if self._rest is not None and (text := row[self._rest]) is not None:
            values |= self._others.fields(decode(text))
        if self._special.fields:
            values |= self._special.read(row)
        return self._entity(**values)

    @property
    def insert(self) -> str:
        values = ", ".join(f":{name}" for name in self.columns)
        return f"INSERT INTO {self.table.name} ({', '.join(self.columns)}) VALUES ({values})"  # noqa: S608

    @property
    def select(self) -> str:
        """The row with an id."""
        return f"SELECT * FROM {self.table.name} WHERE id = :id"  # noqa: S608

    def update(self, columns: Iterable[str]) -> str:
        """Compare-and-set of these columns, by version."""
        names = [name for name in columns if name not in ("id", "version")]
        changes = ", ".join(f"{name} = :{name}" for name in names)
        return (
            f"UPDATE {self.table.name} SET {changes}, version = :version + 1 "  # noqa: S608
            "WHERE id = :id AND version = :version"
        )


def _is_embedded(field: FieldInfo, table: Table) -> bool:
    if not dataclasses.is_dataclass(field.type):
        return False
    return {part.name for part in dataclasses.fields(field.type)} <= table.columns.keys()


def _encoder(column: Column, field: FieldInfo, *, null: bool) -> Convert | None:
    """The encoder of values that are not None; None if they are stored unchanged."""
    encoder = _value_encoder(column, _without_none(field.type))
    if not null or _may_be_none(field.type):
        return encoder
    default = field.default
    if encoder is None:
        return lambda value: None if value == default else value
    return lambda value: None if value == default else encoder(value)


def _value_encoder(column: Column, kind: Any) -> Convert | None:
    if column.type.storage is Storage.JSON:
        convert = json_codec.writer(kind)
        return encode if convert is None else lambda value: encode(convert(value))
    if kind is datetime:
        return micros
    if kind is bool:
        return int
    if _is_enum(kind):
        return attrgetter("value")
    if kind is bytes and column.type.storage is Storage.TEXT:
        return bytes.hex
    return None


def _decoder(column: Column, kind: Any) -> Convert | None:
    if column.type.storage is Storage.JSON:
        convert = json_codec.reader(kind)
        return decode if convert is None else lambda text: convert(decode(text))
    if kind is datetime:
        return moment
    if kind is bool or _is_enum(kind):
        return cast("Convert", kind)
    if kind is bytes and column.type.storage is Storage.TEXT:
        return bytes.fromhex
    return None


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _may_be_none(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind)


def _without_none(kind: Any) -> Any:
    if not _may_be_none(kind):
        return kind
    first, *others = [option for option in get_args(kind) if option is not NoneType]
    return functools.reduce(operator.or_, others, first)
