"""
Control planes on one node with an unreliable environment: calls fail or hang on request, instances
are killed, and control planes end without a chance to clean up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from atoll.clock import SystemClock
from atoll.coordination.memory import MemoryCoordination, MemoryState
from atoll.drivers.local.driver import LocalDriver
from atoll.errors import PermanentError, TemporaryError
from atoll.settings import Settings
from tests.parts import Parts, put_together

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.link.client import Link
    from atoll.model.instance import Handle, InstanceSpec, Observation
    from atoll.reconcile.orphaned_instances import OrphanedInstanceSweep

Kind = Literal["temporary", "permanent", "hang", "after"]
"""`after`: the call succeeds and then reports a failure."""
KINDS: tuple[Kind, ...] = ("temporary", "permanent", "hang", "after")
METHODS = (
    "ensure", "observe", "connect", "pause", "resume", "stop", "destroy", "discard", "copy",
)  # fmt: skip
MANY = timedelta(days=100)


class ShiftedClock:
    """The real time, moved ahead at will."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.ahead)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@dataclass
class Fault:
    kind: Kind
    left: int


class Trouble:
    """The current faults of the node, for all its control planes."""

    def __init__(self) -> None:
        self._faults: dict[str, Fault] = {}
        self._free = asyncio.Event()
        self.hit: dict[str, int] = {}
        """How often each fault struck."""

    def set(self, method: str, kind: Kind, times: int) -> None:
        self._faults[method] = Fault(kind, times)

    def lift(self) -> None:
        self._faults.clear()
        self._free.set()
        self._free = asyncio.Event()

    @contextlib.asynccontextmanager
    async def around(self, method: str) -> AsyncIterator[None]:
        fault = self._faults.get(method)
        if fault is None or not fault.left:
            yield
            return
        fault.left -= 1
        self.hit[f"{method} {fault.kind}"] = self.hit.get(f"{method} {fault.kind}", 0) + 1
        if fault.kind == "hang":
            await self._free.wait()
            raise TemporaryError(f"{method} came to nothing.", code="troubled")
        if fault.kind == "temporary":
            raise TemporaryError(f"{method} does not go now.", code="troubled")
        if fault.kind == "permanent":
            raise PermanentError(f"{method} does not go.", code="troubled")
        yield
        raise TemporaryError(f"{method} says that it did not go.", code="troubled")


class TroubledDriver(LocalDriver):
    """The real one behind calls that may fail."""

    def __init__(self, place: Path, settings: Settings, trouble: Trouble) -> None:
        super().__init__(place, settings.local, settings.link)
        self._trouble = trouble
        self.dead = False
        """Whether its process counts as dead: its calls do nothing."""
        self.made = 0

    @contextlib.asynccontextmanager
    async def _call(self, method: str) -> AsyncIterator[None]:
        if self.dead:
            raise TemporaryError("This process has been killed.", code="dead")
        async with self._trouble.around(method):
            if self.dead:
                raise TemporaryError("This process has been killed.", code="dead")
            yield

    async def open(self) -> None:
        await super().open()
        for part, methods in (
            (self.pausing, ("pause", "resume")),
            (self.workspaces, ("discard", "copy")),
        ):
            for method in methods if part is not None else ():
                setattr(part, method, self._troubled(method, getattr(part, method)))

    def _troubled(
        self, method: str, call: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        async def troubled(*arguments: Any) -> Any:
            async with self._call(method):
                result = await call(*arguments)
            return result

        return troubled

    async def ensure(self, spec: InstanceSpec) -> Handle:
        async with self._call("ensure"):
            handle = await super().ensure(spec)
            self.made += 1
        return handle

    async def observe(self, handle: Handle) -> Observation:
        async with self._call("observe"):
            found = await super().observe(handle)
        return found

    async def connect(self, handle: Handle) -> Link:
        async with self._call("connect"):
            link = await super().connect(handle)
        return link

    async def stop(self, handle: Handle, *, grace: timedelta) -> None:
        async with self._call("stop"):
            await super().stop(handle, grace=grace)

    async def destroy(self, handle: Handle) -> None:
        async with self._call("destroy"):
            await super().destroy(handle)

    async def handles(self) -> list[Handle]:
        if self.dead:
            raise TemporaryError("This process has been killed.", code="dead")
        return await super().handles()


class Replica:
    """A control plane with its loops."""

    def __init__(
        self, parts: Parts, driver: TroubledDriver, orphans: OrphanedInstanceSweep, name: str
    ) -> None:
        self.parts = parts
        self.driver = driver
        self.orphans = orphans
        self.name = name
        self.loops: list[asyncio.Task[None]] = []

    def run(self) -> None:
        loops = {"heartbeat": self.parts.leases.run(), "sessions": self.parts.reconciler.run()}
        self.loops = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]


class World:
    """A node, its directory and its control planes."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.clock = ShiftedClock()
        self.trouble = Trouble()
        self.settings = Settings.model_validate(
            {
                "data_dir": place,
                "session": {
                    "timeout": MANY, "max_timeout": MANY, "memory": 128 * 2**20,
                    "disk": 8 * 2**20, "sweep": 0.1, "timer_sweep": 0.1, "stop_grace": 0.2,
                    "retries": 2,
                },
            }
        )  # fmt: skip
        self._state = MemoryState(SystemClock())
        self._started = 0
        self.replicas: list[Replica] = []

    @property
    def leases(self) -> dict[str, str]:
        """Holders of all leases."""
        return {key: holder.owner for key, holder in self._state.leases.all()}

    async def start(self, size: int = 1) -> None:
        """Start this number of control planes; the first finds no other and maintains the node."""
        for _ in range(size):
            await self.join()

    async def join(self) -> Replica:
        self._started += 1
        name = f"replica-{self._started}"
        ttl = timedelta(hours=1)
        system = SystemClock()
        coordination = MemoryCoordination(
            name, self.settings.coordination, ttl, system, state=self._state
        )
        driver = TroubledDriver(self.place, self.settings, self.trouble)
        parts = put_together(
            self.place,
            self.clock,
            settings=self.settings,
            driver=driver,
            coordination=coordination,
            leases_clock=system,
        )
        await parts.open()
        await driver.open()
        await parts.templates.ensure_default()
        replica = Replica(parts, driver, parts.sweep(await parts.store.cluster()), name)
        if not self.replicas:
            await parts.recovery.run()
        await parts.adoption.once()
        replica.run()
        self.replicas.append(replica)
        return replica

    async def crash(self, replica: Replica) -> None:
        """It does nothing more from this moment on; what it held is known to be free."""
        self.replicas.remove(replica)
        parts = replica.parts
        replica.driver.dead = True
        for loop in replica.loops:
            loop.cancel()
        await asyncio.gather(*replica.loops, return_exceptions=True)
        await parts.background.settle(0)
        parts.timers.close()
        parts.activity.close()
        parts.autosave.close()
        await parts.connections.close()
        self._state.present.drop(replica.name)
        await parts.close()
        await replica.driver.close()

    async def restart(self) -> None:
        size = len(self.replicas)
        for replica in list(self.replicas):
            await self.crash(replica)
        await self.start(size)

    async def clear(self) -> None:
        """Leave nothing of it running."""
        self.trouble.lift()
        for replica in list(self.replicas):
            await self.crash(replica)
        driver = LocalDriver(self.place, self.settings.local, self.settings.link)
        await driver.open()
        for handle in await driver.handles():
            await driver.destroy(handle)
        for workspace in await driver.workspaces.names():
            await driver.workspaces.discard(workspace)
        await driver.close()


def kill(handle: Handle) -> None:
    """As the kernel does when it has to: PID 1 of the sandbox, and with it all the others."""
    for name in ("child", "pid"):
        with contextlib.suppress(ProcessLookupError):
            if int(handle.data[name]) > 1:
                os.kill(int(handle.data[name]), signal.SIGKILL)
