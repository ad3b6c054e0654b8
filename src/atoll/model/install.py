"""Python packages that a session asks for, and the state of their installation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Dependency:
    """
    One package by name, with its extras in brackets if it is to have any; `version` is a set of
    PEP 440 specifiers, empty for any.
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
    """
    The driver's name for the directory with the packages, once they are installed; none when the
    template has them all.
    """
    installed: tuple[str, ...] = ()
    """
    All packages that the dependencies come to, as `name==version`, in order; those that the
    template has in that very version are the template's.
    """
    message: str | None = None
    """Why it failed."""
