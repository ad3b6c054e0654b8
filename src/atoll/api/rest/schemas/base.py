"""
How wire schemas are declared, and how responses are built from them.

A schema names the entity that it describes: `class SessionOut(ResponseBody, of=Session)`. Fields
without a description get the entity's, and `encoder_of` builds the function that turns an entity
into a response. Requests and responses share fields through a common base: a `PatchBody` makes the
fields that it inherits optional; a `ResponseBody` makes them required and drops their bounds, which
are for requests alone. So a field that is stored and returned unchanged is one line in one schema.

Responses are not validated: that would take longer than the rest of the request.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from atoll.model.fields import descriptions_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import GetJsonSchemaHandler

Item = TypeVar("Item")
Encoder = Callable[..., dict[str, Any]]


@dataclass(frozen=True, slots=True)
class From:
    """
    Where the value of a response's field comes from, unless it is the entity's attribute of the
    same name: the path of another attribute, or a function of the entity.
    """

    source: str | Callable[[Any], Any] | None


GIVEN = From(None)
"""The value is an argument of the encoder."""


def _source(name: str, field: FieldInfo) -> str | Callable[[Any], Any] | None:
    origin = next((item for item in field.metadata if isinstance(item, From)), None)
    return name if origin is None else origin.source


def _inherited(cls: type[BaseModel], kind: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """The fields that a schema has from bases of another kind."""
    for name, field in list(cls.model_fields.items()):
        declared = next(base for base in cls.__mro__ if name in inspect.get_annotations(base))
        if not issubclass(declared, kind):
            yield name, field


def _without_bounds(annotation: Any) -> Any:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _without_bounds(args[0])
    if origin in (Union, UnionType):
        return functools.reduce(operator.or_, map(_without_bounds, args))
    return origin[tuple(map(_without_bounds, args))] if origin in (list, dict) else annotation


class Schema(BaseModel):
    entity: ClassVar[type | None] = None
    described_by_entity: ClassVar[set[str]] = set()
    """Fields whose own description is for requests alone."""

    def __init_subclass__(cls, of: type | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if of is not None:
            cls.entity = of

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        # Descriptions are read from source code, so only when they are requested.
        schema = handler(core_schema)
        if cls.entity is not None:
            texts = descriptions_of(cls.entity)
            described = handler.resolve_ref_schema(schema)["properties"]
            for name, field in cls.model_fields.items():
                source = _source(name, field)
                if isinstance(source, str) and source in texts:
                    if name in cls.described_by_entity:
                        described[name].pop("description", None)
                    described[name].setdefault("description", texts[source])
        return schema


class RequestBody(Schema):
    """Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class PatchBody(RequestBody):
    """Only the fields that are given are changed."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for name, field in _inherited(cls, PatchBody):
            if field.default is None:
                continue
            kind: Any = field.annotation
            if field.metadata:
                kind = Annotated[(kind, *field.metadata)]
            cls.__pydantic_fields__[name] = FieldInfo(
                annotation=kind | None, default=None, description=field.description
            )
        cls.model_rebuild(force=True)


class ResponseBody(Schema):
    # Built when first used, by the OpenAPI document: responses are not validated.
    model_config = ConfigDict(extra="ignore", defer_build=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for name, field in _inherited(cls, ResponseBody):
            cls.__pydantic_fields__[name] = FieldInfo(
                annotation=_without_bounds(field.annotation), description=field.description
            )
        cls.described_by_entity = {name for name, _ in _inherited(cls, ResponseBody)}


class Page(ResponseBody, Generic[Item]):
    items: list[Item]
    next_cursor: str | None = Field(
        description="Send it as `cursor` to get the next page; null on the last page."
    )


class Stale(ResponseBody):
    """A record that can be shown from memory while the database is unavailable."""

    stale: bool = Field(
        False,
        description="True when the database is unavailable and this is the last known state; "
        "otherwise absent.",
    )


def timestamp(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")


@functools.cache
def encoder_of(schema: type[ResponseBody], given: type[ResponseBody] | None = None) -> Encoder:
    """
    The function that makes a response of an entity, as a dictionary for JSON. Its keyword arguments
    are the values of fields that are `GIVEN` or belong to the base `given`. It leaves out `stale`,
    which few responses have.
    """
    absent = Stale.model_fields
    arguments = set() if given is None else given.model_fields.keys()
    fields = {name: field for name, field in schema.model_fields.items() if name not in absent}
    blank = dict.fromkeys(fields)
    copied: dict[str, str] = {}
    computed: list[tuple[str, Callable[[Any], Any]]] = []
    for name, field in fields.items():
        source, convert = _source(name, field), _converter(field.annotation)
        if source is None or name in arguments:
            continue
        if isinstance(source, str) and convert is None:
            copied[name] = source
            continue
        get = operator.attrgetter(source) if isinstance(source, str) else source
        computed.append((name, get if convert is None else _chained(get, convert)))
    # The second name keeps the result a tuple when there is one field.
    values_of = operator.attrgetter(*copied.values(), "__class__")

    def encode(entity: Any, **values: Any) -> dict[str, Any]:
        content = blank.copy()
        content.update(zip(copied, values_of(entity), strict=False))
        for name, compute in computed:
            content[name] = compute(entity)
        content.update(values)
        return content

    return encode


def _chained(get: Callable[[Any], Any], convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def value(entity: Any) -> Any:
        found = get(entity)
        return None if found is None else convert(found)

    return value


def _converter(annotation: Any) -> Callable[[Any], Any] | None:
    """What makes JSON of a value of this type; None if it is JSON already."""
    for kind in _alternatives(annotation):
        if kind is datetime:
            return timestamp
        if isinstance(kind, type) and issubclass(kind, ResponseBody):
            return encoder_of(kind)
        if get_origin(kind) is list and (convert := _converter(get_args(kind)[0])) is not None:
            return functools.partial(_each, convert)
    return None


def _each(convert: Callable[[Any], Any], values: Any) -> list[Any]:
    return [convert(value) for value in values]


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)
