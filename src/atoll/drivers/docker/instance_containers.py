"""
Containers of instances: their names, handles and states, and requests that concern one of them.

The engine is the record. A container is found by its name and its labels, so that a control plane
that starts again finds all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll import ids
from atoll.drivers.docker import container_config
from atoll.drivers.docker.errors import CONFLICT, NOT_FOUND, NOT_MODIFIED, ignored, translated
from atoll.drivers.docker.labels import DiskLimit, Label, LinkKind
from atoll.model.instance import Handle, Observation, State
from atoll.model.session import Cause

if TYPE_CHECKING:
    from atoll.drivers.docker.engine import Engine

KIND = "docker"
HANDLE_VERSION = 1
SIGNALLED = 128
"""Exit codes above this one mean that a signal ended the process."""
ZYGOTE_LOST = 70
"""Exit code of an executor that lost its zygote."""


def container_name(instance_id: str) -> str:
    return f"atoll-{instance_id}"


def handle_of(container_id: str, labels: dict[str, str]) -> Handle:
    data: dict[str, str | int] = {
        "container": container_id,
        "workspace": labels.get(Label.WORKSPACE, labels[Label.INSTANCE]),
        "link": labels.get(Label.LINK, ""),
        # Containers of earlier versions have neither of these labels.
        "uid": int(labels.get(Label.UID, container_config.UID)),
        "disk": labels.get(Label.DISK, DiskLimit.EXECUTOR),
    }
    return Handle(labels[Label.INSTANCE], KIND, HANDLE_VERSION, data)


def handle_without_container(instance_id: str) -> Handle:
    """Of an instance of which only files exist, because its start was interrupted."""
    return handle_of("", {Label.INSTANCE: instance_id, Label.LINK: LinkKind.SOCKET})


def observation(inspected: dict[str, Any]) -> Observation:
    state = inspected["State"]
    status, code = state["Status"], int(state.get("ExitCode") or 0)
    if status == "running":
        return Observation(State.RUNNING)
    if status == "paused":
        return Observation(State.PAUSED)
    if status == "removing":
        return Observation(State.GONE)
    if status == "restarting":
        return Observation(State.UNKNOWN)
    if status == "created":
        # Never started, or the engine could not start it.
        return Observation(State.EXITED)
    if state.get("OOMKilled") and (code > SIGNALLED or code == ZYGOTE_LOST):
        return Observation(State.EXITED, Cause.OOM)
    return Observation(State.EXITED, Cause.SIGNAL if code > SIGNALLED else Cause.EXIT)


class InstanceContainers:
    def __init__(self, engine: Engine, node: str) -> None:
        """`node` is the value of `Label.NODE` on this node's containers."""
        self._engine = engine
        self._node = node

    async def list(self, *labels: str) -> list[dict[str, Any]]:
        """Containers of instances that have all these labels, running or not."""
        with translated():
            found = await self._engine.containers(
                {"label": [f"{Label.NODE}={self._node}", *labels]}
            )
        return [container for container in found if _is_instance(container)]

    async def inspect(self, instance_id: str) -> dict[str, Any] | None:
        """Null if the instance has no container, or one of another node on this engine."""
        with translated():
            found = await self._engine.inspect(container_name(instance_id))
        if found is None or (found["Config"]["Labels"] or {}).get(Label.NODE) != self._node:
            return None
        return found

    async def find(self, handle: Handle) -> tuple[dict[str, Any], Observation]:
        """The inspected container, empty if it is gone or another one, and its state."""
        found = await self.inspect(handle.instance_id)
        if found is None or found["Id"] != handle.data["container"]:
            return {}, Observation(State.GONE)
        return found, observation(found)

    async def post(self, container: str, verb: str) -> None:
        """Does nothing if the container is in that state already, or gone."""
        with translated(), ignored(NOT_FOUND, CONFLICT, NOT_MODIFIED):
            await self._engine.call("POST", f"containers/{container}/{verb}")

    async def prepare_to_kill(self, inspected: dict[str, Any]) -> None:
        """
        Resume a paused gVisor container. The engine would need ten seconds to kill it, or fail;
        with the host's kernel it can kill paused containers.
        """
        runtime = inspected["HostConfig"].get("Runtime", "")
        if inspected["State"]["Paused"] and self._engine.is_gvisor(runtime):
            await self.post(inspected["Id"], "unpause")

    async def remove(self, instance_id: str) -> None:
        """Kill and remove the instance's container, and wait until it is gone."""
        while (found := await self.inspect(instance_id)) is not None:
            await self.prepare_to_kill(found)
            await self._engine.remove(found["Id"])


def _is_instance(listed: dict[str, Any]) -> bool:
    """Checks the name, too: any container inherits the labels of its image."""
    instance_id = listed["Labels"].get(Label.INSTANCE, "")
    names = listed["Names"] or ()
    return ids.is_instance_id(instance_id) and f"/{container_name(instance_id)}" in names
