"""
Descriptions of tables that load at once.

`tables` is written with these and not with SQLAlchemy, because every start needs the tables to map
rows and importing SQLAlchemy takes longer than all else that a start does. `metadata` translates
them for alembic.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Storage(Enum):
    TEXT = auto()
    """Text that compares by its bytes on every database."""
    JSON = auto()
    BYTES = auto()
    INTEGER = auto()
    BIGINT = auto()
    DOUBLE = auto()
    SERIAL = auto()
    """A number that the database assigns when a row is inserted."""


@dataclass(frozen=True, slots=True)
class ColumnType:
    storage: Storage
    length: int | None = None
    """Characters, of text."""


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: ColumnType
    primary_key: bool = False
    null: bool = False
    """Whether it may be null."""
    default: str | None = None
    """As SQL: what rows have that were written before there was this column."""


@dataclass(frozen=True, slots=True)
class Index:
    name: str
    columns: tuple[str, ...]
    unique: bool = False


class Table:
    def __init__(self, name: str, *parts: Column | Index) -> None:
        self.name = name
        self.columns = {part.name: part for part in parts if isinstance(part, Column)}
        self.indexes = [part for part in parts if isinstance(part, Index)]


def text(length: int) -> ColumnType:
    return ColumnType(Storage.TEXT, length)
