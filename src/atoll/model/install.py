"""Python packages that a session asks for, and the state of their installation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Dependency:
    """
    A package by name, with extras in brackets if there are any. `version` is a set of PEP 440
    specifiers; empty allows any.
    """

    name: str
    version: str = ""

    @property
    def requirement(self) -> str:
        return f"{self.name}{self.version}"


class InstallStatus(StrEnum):
    INSTALLING = "installing"
    INSTALLED = "installed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Install:
    """The request of a session, and its state."""

    dependencies: tuple[Dependency, ...]
    timeout: int
    """Seconds."""
    fail_on_error: bool = True
    """Whether the session fails if the packages cannot be installed."""
    allow_conflicts: bool = False
    """Whether packages may replace other versions in the template."""
    status: InstallStatus = InstallStatus.INSTALLING
    environment: str | None = None
    """
    The driver's name for the directory with the installed packages; null if the template has them
    all.
    """
    installed: tuple[str, ...] = ()
    """
    All packages that the dependencies resolve to, as `name==version`, sorted. Those that the
    template has in the same version are the template's.
    """
    message: str | None = None
    """Why it failed."""
