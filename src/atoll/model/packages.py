"""
Requirements of Python packages: parsing, normalising and comparing.

What users ask for is parsed here and written anew, so that an installer only ever gets names with
extras and version specifiers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from atoll.errors import InvalidRequest
from atoll.model.install import Dependency

MAX_DEPENDENCIES = 50
ANY_VERSION = SpecifierSet()
WITH_PYTHON = ("pip", "setuptools")
"""Packages that come with an interpreter."""

INSTALL_CPU = 2.0
"""Cores of an installation."""
INSTALL_PROCESSES = 512
"""Processes and threads of an installation."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A template's Python as it reports itself, and its image."""

    version: str
    platform: str
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of installed packages, by normalised name."""
    gives_way: bool = False
    """
    Whether it is the host's own interpreter, whose packages may change and so do not bind sessions.
    """
    image: tuple[str, ...] = ()
    """
    Identifies its image by what the image itself cannot choose: an image id, or a root file system
    and its layers.
    """

    @property
    def held(self) -> Mapping[str, str]:
        """Packages whose versions must not be replaced, unless that is allowed."""
        if not self.gives_way:
            return self.packages
        return {name: self.packages[name] for name in WITH_PYTHON if name in self.packages}

    @property
    def fingerprint(self) -> str:
        """
        Equal for interpreters that can share installed packages. Includes the image, so that an
        interpreter that lies affects its own image only.
        """
        told = [self.version, self.platform, sorted(self.packages.items()), self.gives_way]
        return hashlib.sha256(json.dumps([self.image, told]).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class PackageSet:
    """The result of installing a set of requirements."""

    environment: str | None
    installed: tuple[str, ...]
    made_at: datetime


@dataclass(frozen=True, slots=True)
class EnvironmentInfo:
    """A directory of packages on a node."""

    name: str
    size: int
    """Bytes."""
    used_at: datetime


def parsed(dependency: Dependency) -> Requirement:
    """Raises `InvalidRequest` for anything but a name, extras and versions of PEP 440."""
    shown = dependency.requirement[:120]
    if names_location(f"{dependency.name}{dependency.version}"):
        raise _invalid(LOCATION)
    try:
        # Parsed separately: together, a part of one could be taken for the other.
        requirement = Requirement(dependency.name)
    except InvalidRequirement:
        raise _invalid(f"{dependency.name[:120]!r} is not the name of a package.") from None
    try:
        specifier = SpecifierSet(dependency.version)
    except InvalidSpecifier:
        raise _invalid(
            f"{dependency.version[:120]!r}, for {dependency.name[:120]}, is not a version "
            f"specifier (PEP 440) like {_EXAMPLE}."
        ) from None
    if requirement.marker is not None:
        raise _invalid(f"{shown!r} has an environment marker. Remove it.")
    if requirement.specifier != ANY_VERSION:
        raise _invalid(f"{shown!r} has a version in its name.")
    if any(each.operator == "===" for each in specifier):
        raise _invalid(f"{shown!r} compares versions as text. Use == instead.")
    requirement.specifier = specifier
    return requirement


# Does not show the text: a URL may contain a password.
LOCATION = (
    "URLs, repositories and files cannot be installed. Packages come from the server's index: "
    'write a name and versions, like "requests" or "requests>=2.31,<3".'
)
_LOCATION = re.compile(r"[/\\@]|\.(?:whl|zip|tar\.gz)\s*$")


def names_location(requirement: str) -> bool:
    """Whether it is a URL, a repository or a file."""
    return _LOCATION.search(requirement) is not None


_EXAMPLE = '"==1.4.2" or ">=2.31,<3"'


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(f"dependencies: {message}", field="dependencies")


def read(text: str) -> Dependency:
    """Parse a requirement in one piece, like `requests>=2.31,<3`."""
    if names_location(text):
        raise _invalid(LOCATION)
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        raise _invalid(f"{text[:120]!r} is not a requirement (PEP 508).") from None
    if requirement.marker is not None:
        raise _invalid(f"{text[:120]!r} has an environment marker. Remove it.")
    extras = ",".join(sorted(requirement.extras))
    name = f"{requirement.name}[{extras}]" if extras else requirement.name
    return Dependency(name, str(requirement.specifier))


def normalised(dependencies: Iterable[Dependency]) -> tuple[Dependency, ...]:
    """The set in its canonical form; raises `InvalidRequest` if a package is named twice."""
    found: dict[str, Dependency] = {}
    for dependency in dependencies:
        requirement = parsed(dependency)
        name = canonicalize_name(requirement.name)
        if name in found:
            raise _invalid(f"{name} is named twice.")
        extras = ",".join(sorted(canonicalize_name(extra) for extra in requirement.extras))
        bracketed = f"[{extras}]" if extras else ""
        found[name] = Dependency(f"{name}{bracketed}", str(requirement.specifier))
    if len(found) > MAX_DEPENDENCIES:
        raise _invalid(f"at most {MAX_DEPENDENCIES} are allowed.")
    return tuple(found[name] for name in sorted(found))


def merged(old: Iterable[Dependency], new: Iterable[Dependency]) -> tuple[Dependency, ...]:
    """The union of both sets; of packages in both, the new requirement."""
    kept = {canonicalize_name(parsed(each).name): each for each in normalised(old)}
    kept.update({canonicalize_name(parsed(each).name): each for each in normalised(new)})
    return normalised(kept.values())


def is_pinned(dependencies: Iterable[Dependency]) -> bool:
    """Whether each requires one exact version."""
    for dependency in dependencies:
        specifiers = list(parsed(dependency).specifier)
        exact = [each for each in specifiers if each.operator == "==" and "*" not in each.version]
        if not exact:
            return False
    return True


def _satisfies(specifier: SpecifierSet, version: str) -> bool:
    try:
        return specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        # A version that is not PEP 440 satisfies no specifier, only the absence of one.
        return specifier == ANY_VERSION


def conflicts(dependencies: Iterable[Dependency], has: Mapping[str, str]) -> list[dict[str, str]]:
    """Dependencies that require other versions than the template has."""
    found = []
    for dependency in dependencies:
        requirement = parsed(dependency)
        name = canonicalize_name(requirement.name)
        if name in has and not _satisfies(requirement.specifier, has[name]):
            found.append(
                {"name": name, "requested": str(requirement.specifier), "template_has": has[name]}
            )
    return found


def covered(dependencies: Iterable[Dependency], has: Mapping[str, str]) -> tuple[str, ...] | None:
    """The template's packages that satisfy all dependencies; None if some are not satisfied."""
    found = []
    for dependency in dependencies:
        requirement = parsed(dependency)
        name = canonicalize_name(requirement.name)
        if requirement.extras or name not in has:
            return None
        if not _satisfies(requirement.specifier, has[name]):
            return None
        found.append(f"{name}=={has[name]}")
    return tuple(found)
