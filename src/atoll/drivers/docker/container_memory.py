"""
Memory use and OOM kills of containers.

If the engine is on this machine, both are read from the container's control group. Otherwise the
engine reports them: usage on request, and a kill by an event that arrives a moment later.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from atoll.drivers.docker.engine import lines
from atoll.drivers.docker.errors import translated
from atoll.drivers.docker.labels import Label
from atoll.errors import AtollError

if TYPE_CHECKING:
    from atoll.drivers.docker.engine import Engine

RECONNECT_DELAY = 1.0
EVENT_TIMEOUT = 0.5
"""Seconds to wait for the event of a process that was killed a moment ago."""

log = structlog.get_logger(__name__)


class ContainerMemory:
    def __init__(self, engine: Engine, node: str, cgroup_root: Path) -> None:
        """`node` is the value of `Label.NODE` on this node's containers."""
        self._engine = engine
        self._node = node
        self._cgroup_root = cgroup_root
        self._cgroups: dict[str, Path | None] = {}
        """By instance; null where the control group cannot be read."""
        self._kill_events: dict[str, int] = {}
        """Number of events, by instance."""
        self._reported: dict[str, int] = {}
        """Number of kills that `killed` has reported, by instance."""
        self._event_received = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._task = asyncio.create_task(self._listen(), name="docker events")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def add(self, instance_id: str, container: str, pid: int) -> None:
        """`pid` is the container's first process, in the PID namespace of the engine."""
        self._cgroups[instance_id] = self._cgroup(container, pid) if self._engine.is_local else None

    def instances(self) -> set[str]:
        return set(self._cgroups)

    def forget(self, instance_id: str) -> None:
        for by_instance in (self._cgroups, self._kill_events, self._reported):
            by_instance.pop(instance_id, None)

    def _cgroup(self, container: str, pid: int) -> Path | None:
        """
        The control group that accounts for the container's memory. Its path must contain the id of
        the container: if Atoll runs in a container itself, the PID may be that of another process.
        """
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if container not in path:
                    continue
                if "memory" in controllers.split(","):
                    cgroup = self._cgroup_root / "memory" / path.lstrip("/")
                elif not controllers:
                    cgroup = self._cgroup_root / path.lstrip("/")
                    if not (cgroup / "memory.events").exists():
                        continue
                else:
                    continue
                if cgroup.is_dir():
                    return cgroup
        return None

    async def killed(self, instance_id: str) -> bool:
        """Whether the kernel has killed a process for memory since the last call."""
        kills = self._kills(instance_id)
        if kills is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVENT_TIMEOUT):
                    while self._kill_events.get(instance_id, 0) <= self._reported.get(
                        instance_id, 0
                    ):
                        self._event_received.clear()
                        await self._event_received.wait()
            kills = self._kill_events.get(instance_id, 0)
        before = self._reported.get(instance_id, 0)
        if instance_id in self._cgroups:  # It may have been forgotten during the wait.
            self._reported[instance_id] = kills
        return kills > before

    def _kills(self, instance_id: str) -> int | None:
        cgroup = self._cgroups.get(instance_id)
        if cgroup is None:
            return None
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                for line in (cgroup / name).read_text().splitlines():
                    key, _, count = line.partition(" ")
                    if key == "oom_kill":
                        return int(count)
        return None

    async def used(self, instance_id: str, container: str) -> int | None:
        """Bytes in use without inactive page cache; null if they are not known."""
        cgroup = self._cgroups.get(instance_id)
        if cgroup is not None:
            return _used(cgroup)
        try:
            with translated():
                answer = await self._engine.call(
                    "GET",
                    f"containers/{container}/stats",
                    params={"stream": "0", "one-shot": "1"},
                )
        except AtollError as error:
            log.info("instance.memory_not_known", instance_id=instance_id, error=error.message)
            return None
        memory: dict[str, Any] = json.loads(answer).get("memory_stats", {})
        usage, stats = memory.get("usage"), memory.get("stats", {})
        if usage is None:
            return None
        cache = stats.get("inactive_file", stats.get("total_inactive_file", 0))
        return max(0, int(usage) - int(cache))

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
                            self._count(json.loads(line))
            except (AtollError, ValueError) as error:
                log.info("engine.events_lost", error=str(error))
            await asyncio.sleep(RECONNECT_DELAY)

    def _count(self, event: dict[str, Any]) -> None:
        instance_id = event.get("Actor", {}).get("Attributes", {}).get(Label.INSTANCE)
        if instance_id in self._cgroups:
            self._kill_events[instance_id] = self._kill_events.get(instance_id, 0) + 1
            self._event_received.set()


def _used(cgroup: Path) -> int | None:
    for usage, cache in (
        ("memory.current", "inactive_file"),
        ("memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):
            used = int((cgroup / usage).read_text())
            for line in (cgroup / "memory.stat").read_text().splitlines():
                key, _, count = line.partition(" ")
                if key == cache:
                    used -= int(count)
            return max(0, used)
    return None
