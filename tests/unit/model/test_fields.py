"""Types, bounds and descriptions are read from an entity's declaration."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import pytest

from atoll import model
from atoll.model.fields import descriptions_of, fields_of
from atoll.model.session import Session

ENTITIES = sorted(
    {
        value
        for module in pkgutil.iter_modules(model.__path__, "atoll.model.")
        for value in vars(importlib.import_module(module.name)).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
    },
    key=lambda entity: entity.__qualname__,
)


def test_a_field_has_its_type_and_default() -> None:
    field = fields_of(Session)["archive_after"]

    assert field.type == int | None
    assert (field.required, field.default) == (False, None)


def test_a_field_without_default_is_required_and_one_with_a_factory_is_not() -> None:
    fields = fields_of(Session)

    assert fields["template_id"].required
    assert not fields["env_vars"].required
    assert fields["env_vars"].default == {}


def test_the_docstring_below_a_field_describes_it() -> None:
    descriptions = descriptions_of(Session)

    assert descriptions["archive_after"].startswith("Seconds that it stays stopped")
    assert "\n" not in "".join(descriptions.values())
    assert "template_id" not in descriptions


@pytest.mark.parametrize("entity", ENTITIES, ids=lambda entity: entity.__name__)
def test_the_types_of_every_entity_can_be_resolved(entity: type) -> None:
    assert list(fields_of(entity)) == [field.name for field in dataclasses.fields(entity)]
    assert descriptions_of(entity).keys() <= fields_of(entity).keys()
