"""Python packages that a session is given, and how far their installation has come."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MOST_DEPENDENCIES = 50


@dataclass(frozen=True, slots=True)
class Dependency:
    """One package by name; `version` is a set of PEP 440 specifiers, empty for any."""

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
    """What was asked for, and what has come of it."""

    dependencies: tuple[Dependency, ...]
    timeout: int
    """Seconds."""
    fail_on_error: bool = True
    """Whether a session whose packages cannot be installed fails."""
    allow_conflicts: bool = False
    """Whether other versions than the template's may take their place."""
    status: InstallStatus = InstallStatus.INSTALLING
    environment: str | None = None
    """The driver's name for the directory with the packages, once they are installed."""
    installed: tuple[str, ...] = ()
    """What is in it, as `name==version`, in order."""
    message: str | None = None
    """Why it failed."""
