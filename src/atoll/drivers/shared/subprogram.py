"""Starts a module of ours as a program of its own, in a fresh interpreter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

_SOURCE = Path(__file__).parents[3]


def command(module: ModuleType) -> list[str]:
    """
    The command line that calls `main` of the module, to which its arguments are appended. The
    interpreter reads no environment variables, user site or .pth files: it starts fast, and nothing
    of the user's changes it.
    """
    path, name = str(_SOURCE), module.__name__
    code = f"import sys; sys.path.insert(0, {path!r}); from {name} import main; main()"
    return [sys.executable, "-I", "-S", "-c", code]
