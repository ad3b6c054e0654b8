"""A check of what a node can give its instances, as `atoll doctor` prints it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    detail: str
    fix: str = ""
    """A command that fixes it."""
    essential: bool = False
    """Without it no instance can be made."""
    requirement: str = ""
    """The name in `template.REQUIREMENTS`, if it has one."""
    unprivileged: bool = False
    """Missing because Atoll runs as an ordinary user."""
