"""
What the kernel says of containers' memory: how much they have, and whom it ended for want of it.

On the engine's own machine that is read from the container's control group, at once. Elsewhere the
engine tells: how much when it is asked, and whom it ended by an event, which comes a moment later.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from atoll.drivers.docker.engine import lines, translated
from atoll.drivers.docker.labels import Label
from atoll.errors import AtollError

if TYPE_CHECKING:
    from atoll.drivers.docker.engine import Engine

RECONNECT_SECONDS = 1.0
EVENT_SECONDS = 0.5
"""The longest that an event of a process that was ended is waited for."""

log = structlog.get_logger(__name__)


class ContainerMemory:
    def __init__(self, engine: Engine, node: str, cgroup_root: Path) -> None:
        """`node` is the label of the containers that are ours."""
        self._engine = engine
        self._node = node
        self._root = cgroup_root
        self._groups: dict[str, Path | None] = {}
        """Control groups by instance; none where they cannot be read."""
        self._told: dict[str, int] = {}
        """Kills of which there were events."""
        self._seen: dict[str, int] = {}
        """Kills that were asked about."""
        self._heard = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._task = asyncio.create_task(self._listen(), name="docker events")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def note(self, instance_id: str, container: str, pid: int) -> None:
        """An instance with its first process, as the engine's machine numbers it."""
        self._groups[instance_id] = self._group(container, pid) if self._engine.is_local else None

    def instances(self) -> set[str]:
        """Those that were noted, and not forgotten."""
        return set(self._groups)

    def forget(self, instance_id: str) -> None:
        for known in (self._groups, self._told, self._seen):
            known.pop(instance_id, None)

    def _group(self, container: str, pid: int) -> Path | None:
        """
        The control group that counts a container's memory. Its name has the container's: where this
        process is in a container itself, the number is that of another process.
        """
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
                _, names, path = line.split(":", 2)
                if container not in path:
                    continue
                if "memory" in names.split(","):
                    place = self._root / "memory" / path.lstrip("/")
                elif not names:
                    place = self._root / path.lstrip("/")
                    if not (place / "memory.events").exists():
                        continue
                else:
                    continue
                if place.is_dir():
                    return place
        return None

    async def killed(self, instance_id: str) -> bool:
        """Whether the kernel ended a process since this was last asked."""
        kills = self._kills(instance_id)
        if kills is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVENT_SECONDS):
                    while self._told.get(instance_id, 0) <= self._seen.get(instance_id, 0):
                        self._heard.clear()
                        await self._heard.wait()
            kills = self._told.get(instance_id, 0)
        before = self._seen.get(instance_id, 0)
        if instance_id in self._groups:  # Not forgotten meanwhile.
            self._seen[instance_id] = kills
        return kills > before

    def _kills(self, instance_id: str) -> int | None:
        group = self._groups.get(instance_id)
        if group is None:
            return None
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                for line in (group / name).read_text().splitlines():
                    word, _, count = line.partition(" ")
                    if word == "oom_kill":
                        return int(count)
        return None

    async def used(self, instance_id: str, container: str) -> int | None:
        """Bytes, without what the kernel only keeps of files."""
        group = self._groups.get(instance_id)
        if group is not None:
            return _used(group)
        try:
            with translated():
                async with self._engine.query(
                    f"containers/{container}/stats", params={"stream": "0", "one-shot": "1"}
                ) as response:
                    stats: dict[str, Any] = (await response.json()).get("memory_stats", {})
        except AtollError as error:
            log.info("instance.memory_not_known", instance_id=instance_id, error=error.message)
            return None
        usage = stats.get("usage")
        if usage is None:
            return None
        kept = stats.get("stats", {})
        return max(
            0, int(usage) - int(kept.get("inactive_file", kept.get("total_inactive_file", 0)))
        )

    async def _listen(self) -> None:
        filters = {
            "type": ["container"],
            "event": ["oom"],
            "label": [f"{Label.NODE}={self._node}"],
        }
        while True:
            try:
                with translated():
                    async with self._engine.query(
                        "events", params={"filters": json.dumps(filters)}, timeout=None
                    ) as response:
                        async for line in lines(response):
                            self._hear(json.loads(line))
            except (AtollError, ValueError) as error:
                log.info("engine.events_lost", error=str(error))
            await asyncio.sleep(RECONNECT_SECONDS)

    def _hear(self, event: dict[str, Any]) -> None:
        name = event.get("Actor", {}).get("Attributes", {}).get(Label.INSTANCE)
        if name in self._groups:
            self._told[name] = self._told.get(name, 0) + 1
            self._heard.set()


def _used(group: Path) -> int | None:
    for name, kept in (
        ("memory.current", "inactive_file"),
        ("memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):
            used = int((group / name).read_text())
            for line in (group / "memory.stat").read_text().splitlines():
                word, _, count = line.partition(" ")
                if word == kept:
                    used -= int(count)
            return max(0, used)
    return None
