"""What this process has open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def held(*places: Path) -> list[str]:
    """Files that are open below these directories; threads of other tests may open others."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        # Closed by now, or of another test, at a path that is too long to be read.
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(path for path in found if any(Path(path).is_relative_to(at) for at in places))
