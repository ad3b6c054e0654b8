"""Python packages in requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from atoll.errors import InvalidRequest
from atoll.sdk.arguments import string_dict, wrong_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    Dependency = str | Mapping[str, str]
    """`"requests==2.31.0"`, or `{"name": "requests", "version": "==2.31.0"}`."""

INSTALL_TIMEOUT = 300
"""Seconds, the server's default."""
_ELSEWHERE = re.compile(r"[/\\@]|\.(?:whl|zip|tar\.gz)\s*$")
"""Matches URLs and paths, which cannot be installed from the server's package index."""
_REQUIREMENT = re.compile(
    r"\s*([A-Za-z0-9][A-Za-z0-9._-]*\s*(?:\[[^\]]*\])?)\s*([(<>=!~;].*?)?\s*", re.DOTALL
)


def packages(name: str, value: str | Sequence[Dependency]) -> list[dict[str, str]]:
    """Encodes packages for the body of a request."""
    dependencies = [value] if isinstance(value, str) else value
    if isinstance(dependencies, Mapping) or not isinstance(dependencies, Iterable):
        raise wrong_type(name, "a list of strings", dependencies)
    return [_package(f"{name}[{index}]", each) for index, each in enumerate(dependencies)]


def _package(place: str, dependency: Dependency) -> dict[str, str]:
    if isinstance(dependency, Mapping):
        encoded: dict[str, str] = string_dict(place, dependency)
        return encoded
    if not isinstance(dependency, str):
        raise wrong_type(place, "a string", dependency)
    found = None if _ELSEWHERE.search(dependency) else _REQUIREMENT.fullmatch(dependency)
    if found is None:
        # Without the text, because a URL may contain a password.
        raise InvalidRequest(
            f"{place} is not a package name. URLs, repositories and files cannot be "
            "installed, because packages come from the server's index. Write a name and versions, "
            'like "requests" or "requests>=2.31,<3".',
            field=place,
        )
    name, version = found.groups()
    name = "".join(name.split())
    return {"name": name, "version": version} if version else {"name": name}
