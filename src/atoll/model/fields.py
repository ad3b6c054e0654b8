"""
What an entity's declaration says of its fields: type, description and default.

A field is declared once, in the model, with its description as a docstring below it:

    @dataclass(frozen=True, slots=True)
    class Session:
        archive_after: int | None = None
        \"""Seconds that the session stays stopped before it is archived; never if null.\"""

Rows, wire schemas and documentation are built from `fields_of` and `descriptions_of`. Names
in annotations must therefore exist when the program runs: modules of entities import them outside
`TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class FieldInfo:
    name: str
    type: Any
    """The resolved type."""
    make_default: Callable[[], Any] | None
    """None if the field is required."""

    @property
    def required(self) -> bool:
        return self.make_default is None

    @property
    def default(self) -> Any:
        return None if self.make_default is None else self.make_default()


@cache
def fields_of(entity: type) -> Mapping[str, FieldInfo]:
    """The fields of a dataclass, by name, in the order of their declaration."""
    hints = get_type_hints(entity)
    return MappingProxyType(
        {field.name: _info(field, hints[field.name]) for field in dataclasses.fields(entity)}
    )


@cache
def descriptions_of(entity: type) -> Mapping[str, str]:
    """
    The docstrings of a dataclass's fields, by name, each on one line; fields without one are left
    out. Reads the module's source, so call it where time to start does not matter.
    """
    found: dict[str, str] = {}
    body = _source(entity.__module__)[entity.__name__].body
    for statement, following in pairwise(body):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as text)),
            ):
                found[name] = " ".join(text.split())
    return MappingProxyType(found)


@cache
def _source(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _info(field: dataclasses.Field[Any], hint: Any) -> FieldInfo:
    make_default: Callable[[], Any] | None = None
    if field.default_factory is not dataclasses.MISSING:
        make_default = field.default_factory
    elif field.default is not dataclasses.MISSING:
        default = field.default
        make_default = lambda: default  # noqa: E731
    return FieldInfo(field.name, hint, make_default)
