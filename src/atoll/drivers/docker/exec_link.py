"""
Links through the engine, by `docker exec`.

The engine starts a relay process in the container, which passes bytes between its standard streams
and the executor's socket. The container needs no network for that, and the link is as secure as the
connection to the engine. The relay runs as a user of its own, from whom alone the executor accepts
connections, so user code cannot impersonate it.

The connection to a relay ends with its container. Under gVisor it may not: a leftover shim can hold
it open for minutes. Therefore a background task closes connections to containers that do not run.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import structlog

from atoll.drivers.docker.engine import API
from atoll.drivers.docker.errors import translated
from atoll.drivers.docker.hijacked_connection import HijackedConnection
from atoll.drivers.docker.labels import Label
from atoll.drivers.shared.executor_bundle import EXECUTOR
from atoll.errors import AtollError, TemporaryError
from atoll.link.client import Link
from atoll.link.errors import LinkLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence
    from datetime import timedelta

    from atoll.drivers.docker.engine import Engine
    from atoll.link.transport import LinkTransport
    from atoll.settings import LinkSettings

SOCKET_NAME = "atoll-link"
"""Abstract name of the executor's socket, which relays connect to."""
RELAY_UID = 1001
MAX_RELAYS = 16
"""Relays for which a container has room in addition to the processes of user code."""
CHECK_INTERVAL = 2.0
"""
Seconds between two checks. A connection is closed if its container was not running at two checks in
a row.
"""
BOOT = f"import sys; sys.path.insert(0, {{path!r}}); from {EXECUTOR}.relay import main; main()"

log = structlog.get_logger(__name__)


class ExecLinks:
    def __init__(self, engine: Engine, node: str) -> None:
        """`node` is the value of `Label.NODE` on this node's containers."""
        self._engine = engine
        self._node = node
        self._open: dict[HijackedConnection, str] = {}
        """Each with the id of its container."""
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def start_relay(
        self, container: str, python: Sequence[str], executor: str
    ) -> HijackedConnection:
        """
        Start a relay, which waits for the executor's socket. `python` is the command that starts
        the interpreter in the container, `executor` the path of the executor's bundle there.
        """
        command = [*python, "-I", "-S", "-B", "-c", BOOT.format(path=executor), SOCKET_NAME]
        try:
            with translated():
                exec_id = await _create_exec(self._engine, container, command)
                connection = await _start_exec(self._engine, exec_id)
        except AtollError as error:
            # The container may be gone, paused, or have no room for another process.
            raise LinkLost(
                f"Cannot start a relay in container {container}: {error.message}"
            ) from error
        self._watch(container, connection)
        return connection

    async def connect(
        self,
        container: str,
        relay: Awaitable[HijackedConnection],
        settings: LinkSettings,
        *,
        timeout: timedelta,
        token: str,
    ) -> Link:
        """A link over a relay of `start_relay`."""

        async def dial(transport: LinkTransport) -> None:
            (await relay).carry(transport)

        return await Link.over(dial, container, settings, timeout=timeout, token=token)

    def _watch(self, container: str, connection: HijackedConnection) -> None:
        self._open[connection] = container
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._close_orphans(), name="docker exec links")

    async def _close_orphans(self) -> None:
        """Runs while there are open connections."""
        missing_before: set[HijackedConnection] = set()
        while self._open:
            await asyncio.sleep(CHECK_INTERVAL)
            self._open = {
                one: container for one, container in self._open.items() if not one.is_closing()
            }
            checked = dict(self._open)
            try:
                running = await self._running()
            except TemporaryError as error:
                log.info("relays.not_listed", error=error.message)
                continue
            missing = {one for one, container in checked.items() if container not in running}
            for one in missing & missing_before:
                log.info("relay.closed", container=checked[one])
                one.abort()
            missing_before = missing

    async def _running(self) -> set[str]:
        """Ids of running and paused containers."""
        filters = {"label": [f"{Label.NODE}={self._node}"]}
        with translated():
            found = await self._engine.containers(filters, stopped=False)
        return {str(container["Id"]) for container in found}


async def _create_exec(engine: Engine, container: str, command: list[str]) -> str:
    body = {
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "User": f"{RELAY_UID}:{RELAY_UID}",
        "WorkingDir": "/",
        "Cmd": command,
    }
    answer = await engine.call("POST", f"containers/{container}/exec", data=json.dumps(body))
    return str(json.loads(answer)["Id"])


async def _start_exec(engine: Engine, exec_id: str) -> HijackedConnection:
    connection = HijackedConnection(f"/{API}/exec/{exec_id}/start", {"Detach": False, "Tty": False})
    try:
        await engine.dial(connection)
        await connection.upgraded
    except BaseException:
        connection.abort()
        raise
    return connection
