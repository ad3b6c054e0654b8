"""Paths inside a session."""

from __future__ import annotations

WORKSPACE = "/workspace"


def working_directory(cwd: str | None) -> str:
    """The absolute path of a working directory; a relative one is below the workspace."""
    if cwd is None:
        return WORKSPACE
    return cwd if cwd.startswith("/") else f"{WORKSPACE}/{cwd}"
