"""
Values of entities as JSON, derived from their types.

Times become microseconds since 1970, sets become sorted lists, and a dataclass becomes an object of
its fields. Reading is lenient: a missing field has its default, and an unknown field, which a newer
replica may have written, is skipped.

Codecs are built once, when a module is imported. One that has nothing to do is None, so that a
value which is already JSON is not touched.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache
from json.encoder import c_make_encoder, encode_basestring_ascii  # type: ignore[attr-defined]
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from atoll.model.execution import Attempt, Outcome, Request
from atoll.model.fields import fields_of
from atoll.model.install import Dependency
from atoll.model.session import Warning
from atoll.model.volume import VolumeMount

if TYPE_CHECKING:
    from collections.abc import Collection

Convert = Callable[[Any], Any]

AS_LIST: frozenset[type] = frozenset({Attempt, Dependency, VolumeMount, Warning})
"""Dataclasses written as lists of their values, which are shorter. Add fields at the end only."""
WITHOUT_DEFAULTS: frozenset[type] = frozenset({Outcome, Request})
"""Written without the fields that have their default: shorter rows make commits faster."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_REQUIRED = object()


def _make_encoder() -> Callable[[Any], str]:
    """`JSONEncoder.encode` without the encoder that it makes anew for every call."""
    plain = json.JSONEncoder(separators=(",", ":"))
    if c_make_encoder is None:
        return plain.encode
    separators, sort, skip, nan = (":", ","), False, False, True
    pieces = c_make_encoder(
        None, plain.default, encode_basestring_ascii, None, *separators, sort, skip, nan
    )
    return lambda value: "".join(pieces(value, 0))


encode = _make_encoder()
decode = json.JSONDecoder().decode


def micros(time: datetime) -> int:
    return (time - _EPOCH) // _MICROSECOND


def moment(value: int) -> datetime:
    return _EPOCH + timedelta(microseconds=value)


def writer(kind: Any) -> Convert | None:
    """Turns values of a type into what `json` can write; None if they are that already."""
    return _codec(kind)[0]


def reader(kind: Any) -> Convert | None:
    """Turns what `json` read into values of a type; None if it is that already."""
    return _codec(kind)[1]


@cache
def _codec(kind: Any) -> tuple[Convert | None, Convert | None]:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        options = [option for option in arguments if option is not NoneType]
        if len(options) > 1:
            return _plain(*options)
        write, read = _codec(options[0])
        return _optional(write), _optional(read)
    if origin is tuple:
        # JSON writes tuples as lists without help.
        item = arguments[0] if arguments[-1] is Ellipsis else Any
        write, read = _codec(item)
        return _each(write, list), _each(read, tuple) or tuple
    if origin is frozenset:
        return sorted, frozenset
    if origin is dict:
        return _plain(*arguments)
    if kind is datetime:
        return micros, moment
    if isinstance(kind, type) and issubclass(kind, Enum):
        return None, kind
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        codec = ListCodec(kind) if kind in AS_LIST else ObjectCodec(kind)
        return codec.write, codec.read
    return _plain(kind)


def _plain(*kinds: Any) -> tuple[None, None]:
    for kind in kinds:
        if kind not in (Any, str, int, float, bool) and _codec(kind) != (None, None):
            raise TypeError(f"{kind} cannot be written as JSON here")
    return None, None


def _optional(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda value: None if value is None else convert(value)


def _each(convert: Convert | None, collect: Convert) -> Convert | None:
    if convert is None:
        return None
    return lambda values: collect(map(convert, values))


class ObjectCodec:
    """A dataclass as a JSON object, or some of its fields."""

    def __init__(self, kind: type, names: Collection[str] | None = None) -> None:
        fields = [
            field for field in fields_of(kind).values() if names is None or field.name in names
        ]
        self._kind = kind
        self._short = kind in WITHOUT_DEFAULTS
        self._usual = {
            field.name: _REQUIRED if field.required else field.default for field in fields
        }
        self._writers = {field.name: write for field in fields if (write := writer(field.type))}
        self._readers = {field.name: read for field in fields if (read := reader(field.type))}

    def write(self, value: Any) -> dict[str, Any]:
        if self._short:
            found = {
                name: given
                for name, usual in self._usual.items()
                if (given := getattr(value, name)) != usual
            }
        else:
            found = {name: getattr(value, name) for name in self._usual}
        for name, write in self._writers.items():
            if name in found:
                found[name] = write(found[name])
        return found

    def fields(self, found: dict[str, Any]) -> dict[str, Any]:
        """What was written, as arguments of the dataclass."""
        if not found.keys() <= self._usual.keys():
            found = {name: found[name] for name in self._usual if name in found}
        for name, read in self._readers.items():
            if name in found:
                found[name] = read(found[name])
        return found

    def read(self, found: dict[str, Any]) -> Any:
        return self._kind(**self.fields(found))


class ListCodec:
    """A dataclass as a JSON list of its values."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._fields = [
            (field.name, writer(field.type), reader(field.type))
            for field in fields_of(kind).values()
        ]

    def write(self, value: Any) -> list[Any]:
        return [
            getattr(value, name) if write is None else write(getattr(value, name))
            for name, write, _ in self._fields
        ]

    def read(self, found: list[Any]) -> Any:
        return self._kind(
            *(
                item if read is None else read(item)
                for item, (_, _, read) in zip(found, self._fields, strict=False)
            )
        )
