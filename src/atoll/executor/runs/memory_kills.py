"""
Whether the kernel killed a process of this container because its memory ran out.

The control group shows how often that happened. A container has it read-only; where it has none,
the driver finds out from outside.
"""

from __future__ import annotations

FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Of both versions of control groups."""
COUNTER = b"oom_kill "


class MemoryKills:
    def __init__(self, files: tuple[str, ...] = FILES) -> None:
        self._files = files
        self._seen = self._count()

    def take(self) -> bool:
        """Whether there was one since the last call."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        for path in self._files:
            try:
                with open(path, "rb") as file:
                    lines = file.readlines()
            except OSError:
                continue
            for line in lines:
                if line.startswith(COUNTER):
                    return int(line[len(COUNTER) :])
        return 0
