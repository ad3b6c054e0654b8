"""
A driver of each kind on its own node.

A test with the fixture `node` runs on the `USUAL` kinds; `on` selects others. Another kind is added
to `make_driver`, and to `Node` for the view of the host. The kinds on a cluster run from
`tests/kubernetes` alone, where there is one.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import pytest

from atoll import ids
from atoll.drivers.docker.driver import DockerDriver
from atoll.drivers.docker.labels import Label
from atoll.drivers.docker.node_identity import NAME_FILE
from atoll.drivers.kubernetes.driver import KubernetesDriver
from atoll.drivers.local.driver import LocalDriver
from atoll.model.instance import Handle, InstanceSpec
from atoll.model.resources import Resources
from atoll.model.template import Template
from atoll.settings import DockerSettings, KubernetesSettings, LinkSettings, LocalSettings
from tests.host_processes import below, living, of_instances, processes
from tests.runs import run_over
from tests.servers.images import PYTHON
from tests.servers.kubernetes import images as cluster_images

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from atoll.drivers.base import Driver
    from atoll.link.client import Link
    from tests.servers.docker import Dockerd

AnyDriver = TypeVar("AnyDriver", bound="Driver")

MiB = 1024 * 1024
LIMITS = Resources(cpu=1.0, memory=128 * MiB, disk=16 * MiB, max_processes=32)
LINK = LinkSettings(connect_timeout=timedelta(seconds=30))


ON_CLUSTER: dict[str, Literal["direct", "forward"]] = {
    "kubernetes": "direct",
    "forwarded": "forward",
}
"""How links reach the pods, of the kinds that are a cluster (`tests/kubernetes/nodes.py`)."""
USUAL = ("local", "docker")
"""Of a test without `on`; in `tests/kubernetes` it is the cluster."""
RUNTIMES = {"docker": "", "gvisor": "runsc", "remote": ""}
"""What runs the containers of the kinds that have any; the engine's own choice if empty."""


def on(*kinds: str) -> pytest.MarkDecorator:
    """The kinds of node that a test is for."""
    return pytest.mark.parametrize("node", [_parameter(kind) for kind in kinds], indirect=True)


def _parameter(kind: str) -> pytest.ParameterSet:
    return pytest.param(kind, marks=[pytest.mark.quick] if kind == "local" else [])


everywhere = on(*USUAL, "gvisor", "remote", "kubernetes")
"""For what may differ with the runtime, or with the way to the engine; these take longer."""
over_every_link = on(*USUAL, "gvisor", "remote", *ON_CLUSTER)
everywhere_durable = on(*USUAL, "gvisor", "remote")
"""Where a workspace outlives its instance: a directory of a pod does not."""
durable = on(*USUAL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select(config, items, Path(__file__).parent, lambda kind: kind not in ON_CLUSTER)


def select(
    config: pytest.Config,
    items: list[pytest.Item],
    directory: Path,
    condition: Callable[[str], bool],
) -> None:
    """Deselect tests in a directory that are for other kinds of node."""

    def is_selected(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        kind = None if callspec is None else callspec.params.get("node")
        return kind is None or not item.path.is_relative_to(directory) or condition(kind)

    config.hook.pytest_deselected(items=[item for item in items if not is_selected(item)])
    items[:] = [item for item in items if is_selected(item)]


def make_driver(kind: str, data_dir: Path, where: dict[str, Any]) -> Driver:
    """`where` is how the engine is reached, of a kind that has one."""
    if kind == "local":
        return LocalDriver(data_dir, LocalSettings(), LINK)
    if kind in ON_CLUSTER:
        return KubernetesDriver(
            KubernetesSettings(
                link=ON_CLUSTER[kind], image=cluster_images.PYTHON, open_network=True, **where
            ),
            LINK,
            LocalSettings(),
            cluster="contract",
            secret="of-all-replicas",
        )
    settings = DockerSettings(image=PYTHON, runtime=RUNTIMES[kind], **where)
    return DockerDriver(data_dir, settings, LINK, LocalSettings())


def template(**fields: Any) -> Template:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    base: dict[str, Any] = {
        "id": f"t{ids.instance_id()}", "name": "t", "created_at": now, "updated_at": now,
        "default_resources": LIMITS,
    }  # fmt: skip
    return Template(**(base | fields))


def spec(**fields: Any) -> InstanceSpec:
    base: dict[str, Any] = {
        "instance_id": ids.instance_id(), "template": template(), "resources": LIMITS,
    }  # fmt: skip
    return InstanceSpec(**(base | fields))


def own_children() -> set[int]:
    return {pid for pid, (parent, _, _) in processes().items() if parent == os.getpid()}


_connected: WeakKeyDictionary[Driver, Handle] = WeakKeyDictionary()
"""The instance that each driver has connected to last."""


def note_links(driver: Driver, links: list[Link]) -> None:
    """Keep those that it makes, to be closed."""
    connect = driver.connect

    async def noted(handle: Handle) -> Link:
        link = await connect(handle)
        links.append(link)
        _connected[driver] = handle
        return link

    driver.connect = noted  # type: ignore[method-assign]


async def clear(driver: Driver, links: list[Link]) -> None:
    """Close a driver, with nothing left of what it made."""
    try:
        # Those that a test has left open.
        for link in links:
            link.close()
        for handle in await driver.handles():
            await driver.destroy(handle)
        for workspace in await driver.workspaces.names():
            await driver.workspaces.discard(workspace)
        # Before its loop ends.
        for link in links:
            await asyncio.wait_for(link.closed, 30)
    finally:
        await driver.close()


@asynccontextmanager
async def opened(driver: AnyDriver) -> AsyncIterator[AnyDriver]:
    """Cleared in the end."""
    links: list[Link] = []
    note_links(driver, links)
    await driver.open()
    try:
        yield driver
    finally:
        await clear(driver, links)


class Node:
    """A machine with a driver, which can be closed and replaced by a new one."""

    def __init__(self, kind: str, data_dir: Path, engine: Dockerd | None) -> None:
        self.kind = kind
        self.data_dir = data_dir
        self._engine = engine
        self._others = own_children()
        self._links: list[Link] = []
        self.driver: Driver = self._make()

    @property
    def engine(self) -> Dockerd:
        assert self._engine is not None, f"{self.kind} has none"
        return self._engine

    @property
    def where(self) -> dict[str, Any]:
        """As settings. The engine of `remote` is spoken to as if it was on another machine."""
        if self._engine is None:
            return {}
        return self._engine.over_tls if self.kind == "remote" else {"url": self._engine.url}

    def _make(self) -> Driver:
        driver = make_driver(self.kind, self.data_dir, self.where)
        note_links(driver, self._links)
        return driver

    async def take_over(self) -> Driver:
        """As after the end of the process: a new driver that knows only what the node knows."""
        await self.driver.close()
        self.driver = self._make()
        await self.driver.open()
        return self.driver

    async def clear(self) -> None:
        await clear(self.driver, self._links)

    def pid_1(self, handle: Handle) -> int:
        """The host's pid of the first process, of an instance that has not ended."""
        if self._engine is None:
            return int(handle.data["child"])
        pid = int(self._engine.inspect(str(handle.data["container"]))["State"]["Pid"])
        assert pid, f"{handle.instance_id} has ended"
        return pid

    def inside(self, handle: Handle) -> set[int]:
        """The host's pids of all its processes."""
        first = self.pid_1(handle)
        return below(first) | {first}

    async def await_end(self, pids: set[int]) -> None:
        """Of the processes of an instance that was destroyed."""
        assert not pids & living()

    @property
    def counts_memory(self) -> bool:
        """Whether the driver reports the memory of an instance as the kernel counts it."""
        return "cgroup_memory" in self.driver.capabilities.provides

    async def alone(self) -> bool:
        """Whether nothing is left of any instance, in the making or not."""
        if self._engine is None:
            # The driver's helper is a child of this process, and would be the parent.
            return not [
                child
                for helper in own_children() - self._others
                for child in of_instances(below(helper))
            ]
        name = (self.data_dir / "node" / NAME_FILE).read_text()
        return not self._engine.containers(label=[f"{Label.NODE}={name}"])


@pytest.fixture(params=[_parameter(kind) for kind in USUAL])
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Node]:
    """With the arguments of this kind."""
    engine = None
    if request.param == "local":
        request.getfixturevalue("bubblewrap")
    else:
        engine = request.getfixturevalue("dockerd")
    if request.param == "gvisor":
        request.getfixturevalue("runsc")
    made = Node(request.param, tmp_path / "data", engine)
    await made.driver.open()
    yield made
    await made.clear()


class RunOutput:
    """Output of a run, in order."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, bytes]] = []

    def started(self) -> None: ...

    def heartbeat(self) -> None: ...

    def output(self, sequence: int, channel: int, data: bytes) -> None:
        self.pieces.append((sequence, channel, data))

    @property
    def stdout(self) -> bytes:
        return b"".join(data for _, channel, data in self.pieces if channel == 1)

    @property
    def last(self) -> int:
        return self.pieces[-1][0] if self.pieces else 0


def job(driver: Driver, code: str, **fields: Any) -> dict[str, Any]:
    limits, watch = driver.limits.executor_limits(_connected[driver], LIMITS)
    base: dict[str, Any] = {
        "id": ids.instance_id(), "kind": "python", "code": code, "command": None, "event": {},
        "stdin": None, "args": [], "env": {}, "cwd": "/workspace", "timeout": 30.0,
        "output_limit": MiB, "return_limit": MiB, "artifact_limit": 100, "limits": limits,
        "watch": watch,
    }  # fmt: skip
    return base | fields


async def printed(driver: Driver, link: Link, code: str) -> str:
    output = RunOutput()
    result = await run_over(link, job(driver, code), output)
    assert result["exit_code"] == 0, (result, output.pieces)
    return output.stdout.decode().strip()


async def started(driver: Driver, wanted: InstanceSpec) -> tuple[Handle, Link]:
    handle = await driver.ensure(wanted)
    return handle, await driver.connect(handle)
