"""The memory limit of this container, as the kernel enforces it now."""

from __future__ import annotations

FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Of both versions of control groups."""


def memory_limit(files: tuple[str, ...] = FILES) -> int:
    """Bytes; 0 if there is no limit, or none that can be read."""
    for path in files:
        try:
            with open(path, "rb") as file:
                text = file.read().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else 0
    return 0
