"""Python packages, as requests name them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Dependency = str | Mapping[str, str]
    """`"requests==2.31.0"`, or `{"name": "requests", "version": "==2.31.0"}`."""

INSTALL_TIMEOUT = 300
"""Seconds that the server gives an installation for which none are named."""
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+\s*(?:\[[^\]]*\])?)\s*(.*?)\s*", re.DOTALL)


def dependencies_body(dependencies: str | Sequence[Dependency]) -> list[dict[str, str]]:
    if isinstance(dependencies, str):
        dependencies = [dependencies]
    return [_body(each) for each in dependencies]


def _body(dependency: Dependency) -> dict[str, str]:
    if not isinstance(dependency, str):
        return dict(dependency)
    found = _REQUIREMENT.fullmatch(dependency)
    if found is None:
        raise InvalidRequest(
            f'dependencies: {dependency!r} is not like "requests" or "requests>=2.31,<3".'
        )
    name, version = found.groups()
    name = "".join(name.split())
    return {"name": name, "version": version} if version else {"name": name}
