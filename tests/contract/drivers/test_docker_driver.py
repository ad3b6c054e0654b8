"""The Docker driver, while its engine fails and other clients change its containers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from atoll import ids
from atoll.drivers.base import NodeStatus
from atoll.drivers.docker.driver import DockerDriver
from atoll.errors import PermanentError, TemporaryError
from atoll.link.client import Link
from atoll.link.errors import ExecutorError, LinkLost
from atoll.model.instance import Handle, Observation, State
from atoll.model.session import Cause
from atoll.settings import DockerSettings, LinkSettings, LocalSettings
from tests.contract.drivers.conftest import (
    LIMITS,
    MiB,
    Node,
    RunOutput,
    job,
    on,
    printed,
    spec,
    started,
    template,
)
from tests.contract.drivers.parts import pausing_of, resizing_of
from tests.contract.drivers.test_docker_isolation import build
from tests.contract.drivers.test_driver_contract import until
from tests.runs import run_over
from tests.servers.images import PYTHON, SHELL

if TYPE_CHECKING:
    from tests.servers.docker import Dockerd

pytestmark = pytest.mark.anyio

UNAVAILABLE = "engine_unavailable"


@pytest.fixture
async def mortal(own_dockerd: Dockerd, tmp_path: Path) -> AsyncIterator[Node]:
    """A node with its own engine."""
    node = Node("docker", tmp_path / "data", own_dockerd)
    await node.driver.open()
    yield node
    await node.clear()
    assert own_dockerd.containers() == []


def directory(node: Node, handle: Handle) -> Path:
    return node.data_dir / "node" / "instances" / handle.instance_id


def ask(node: Node, handle: Handle, verb: str, **about: str) -> None:
    """Change a container as another client of the engine."""
    node.engine.ask("POST", f"/containers/{handle.data['container']}/{verb}", params=about)


# Other clients


@pytest.mark.parametrize(
    ("verb", "seen"),
    [
        ("kill", Observation(State.EXITED, Cause.SIGNAL)),
        ("stop", Observation(State.EXITED, Cause.SIGNAL)),
        ("pause", Observation(State.PAUSED)),
    ],
)
@on("docker")
async def test_changes_made_by_other_clients_are_observed(
    node: Node, verb: str, seen: Observation
) -> None:
    wanted = spec()
    handle, link = await started(node.driver, wanted)
    link.close()
    ask(node, handle, verb)
    assert await node.driver.observe(handle) == seen
    with pytest.raises(LinkLost):
        await node.driver.connect(handle)
    driver = await node.take_over()
    assert await driver.handles() == [handle]
    assert await driver.observe(handle) == seen
    if seen.state is State.PAUSED:
        await pausing_of(driver).resume(handle)
        assert await driver.ensure(wanted) == handle
    else:
        assert (await driver.ensure(wanted)).data["container"] != handle.data["container"]
        assert (await driver.observe(handle)).state is State.GONE
    (found,) = await driver.handles()
    link = await driver.connect(found)
    assert await printed(driver, link, "print(1)") == "1"
    link.close()


@on("docker")
async def test_a_container_removed_by_another_client_is_gone(node: Node) -> None:
    wanted = spec()
    handle, link = await started(node.driver, wanted)
    await printed(node.driver, link, "open('kept', 'w').write('kept')")
    link.close()
    node.engine.remove(str(handle.data["container"]))
    assert (await node.driver.observe(handle)).state is State.GONE
    # It is found by its directory, which still exists.
    (found,) = await node.driver.handles()
    assert found.instance_id == handle.instance_id
    for each in (handle, found):
        assert (await node.driver.observe(each)).state is State.GONE
        await pausing_of(node.driver).pause(each)
        await pausing_of(node.driver).resume(each)
        await node.driver.stop(each, grace=timedelta(seconds=1))
        assert not await node.driver.limits.out_of_memory(each)
        with pytest.raises(LinkLost):
            await node.driver.connect(each)
    again, link = await started(node.driver, replace(wanted, workspace=wanted.instance_id))
    assert await printed(node.driver, link, "print(open('kept').read())") == "kept"
    link.close()
    node.engine.remove(str(again.data["container"]))
    await node.driver.destroy(found)
    assert await node.driver.handles() == []
    assert not directory(node, handle).exists()


@on("docker")
async def test_a_container_without_its_directory_is_found_and_removed(node: Node) -> None:
    handle = await node.driver.ensure(spec())
    shutil.rmtree(directory(node, handle))
    driver = await node.take_over()
    assert await driver.handles() == [handle]
    with pytest.raises(LinkLost):
        await driver.connect(handle)
    await driver.destroy(handle)
    assert await driver.handles() == []
    assert await node.alone()


@on("docker")
async def test_a_container_that_was_never_started_is_replaced(node: Node) -> None:
    wanted = spec()
    handle = await node.driver.ensure(wanted)
    about = node.engine.inspect(str(handle.data["container"]))
    node.engine.remove(str(handle.data["container"]))
    body = about["Config"] | {"HostConfig": about["HostConfig"]}
    name = {"name": about["Name"].lstrip("/")}
    made = node.engine.ask("POST", "/containers/create", params=name, json=body).json()["Id"]
    driver = await node.take_over()
    (found,) = await driver.handles()
    assert found == replace(handle, data=handle.data | {"container": made})
    assert (await driver.observe(found)).state is State.EXITED
    assert (await driver.observe(handle)).state is State.GONE
    again, link = await started(driver, replace(wanted, workspace=wanted.instance_id))
    assert again.data["container"] not in (made, handle.data["container"])
    assert await printed(driver, link, "print(1)") == "1"
    link.close()


@on("docker")
async def test_a_container_without_a_configuration_is_replaced(node: Node) -> None:
    wanted = spec()
    handle = await node.driver.ensure(wanted)
    # As if the driver was killed before it sent the configuration.
    (directory(node, handle) / "link" / "link.sock").unlink()
    driver = await node.take_over()
    again, link = await started(driver, replace(wanted, workspace=wanted.instance_id))
    assert again.data["container"] != handle.data["container"]
    link.close()
    assert await driver.handles() == [again]


@on("docker")
async def test_nodes_on_one_engine_do_not_touch_each_others_containers(
    node: Node, tmp_path: Path
) -> None:
    mine = await node.driver.ensure(spec())
    other = Node("docker", tmp_path / "other", node.engine)
    await other.driver.open()
    bystander = node.engine.begin(SHELL, "sleep", "infinity")
    try:
        theirs = await other.driver.ensure(spec())
        assert await node.driver.handles() == [mine]
        assert await other.driver.handles() == [theirs]
        assert (await other.driver.observe(mine)).state is State.GONE
        for call in (
            pausing_of(other.driver).pause,
            lambda handle: other.driver.stop(handle, grace=timedelta(0)),
            other.driver.destroy,
        ):
            await call(mine)
            assert (await node.driver.observe(mine)).state is State.RUNNING
        with pytest.raises(LinkLost):
            await other.driver.connect(mine)
        with pytest.raises(PermanentError):
            await other.driver.ensure(spec(instance_id=mine.instance_id))
        assert (await node.driver.observe(mine)).state is State.RUNNING
    finally:
        await other.clear()
    assert await node.driver.handles() == [mine]
    assert (await node.driver.observe(mine)).state is State.RUNNING
    assert node.engine.inspect(bystander)["State"]["Running"]
    node.engine.remove(bystander)


# The link


@on("docker")
async def test_the_executor_refuses_a_client_without_its_token(node: Node, tmp_path: Path) -> None:
    handle, link = await started(node.driver, spec())
    other, second = await started(node.driver, spec())
    assert isinstance(node.driver, DockerDriver)
    # The full path is too long for a socket address.
    (tmp_path / "short").symlink_to(directory(node, handle) / "link")
    path = str(tmp_path / "short" / "link.sock")
    for wrong in (None, "", "0" * 64, node.driver._identity.token(other.instance_id)):
        with pytest.raises(ExecutorError) as caught:
            await Link.connect(path, LinkSettings(), timeout=timedelta(seconds=5), token=wrong)
        assert caught.value.code == "unauthenticated"
    assert await printed(node.driver, link, "print(1)") == "1"
    link.close()
    second.close()


# The engine


async def refused(node: Node, handle: Handle) -> None:
    """All calls fail with a temporary error, and no instance is observed as gone."""
    driver = node.driver
    assert (await driver.observe(handle)).state is State.UNKNOWN
    for call in (
        lambda: driver.ensure(spec()),
        lambda: driver.handles(),
        lambda: pausing_of(driver).pause(handle),
        lambda: pausing_of(driver).resume(handle),
        lambda: driver.stop(handle, grace=timedelta(0)),
        lambda: driver.destroy(handle),
        lambda: resizing_of(driver).resize(handle, spec().resources),
        lambda: driver.workspaces.copy(driver.workspaces.of(handle), "copy"),
        # An image that is not cached.
        lambda: driver.images.is_built(template(image="never-asked-for:1")),
    ):
        asked = call()
        with pytest.raises(TemporaryError) as caught:
            await asked
        assert caught.value.code == UNAVAILABLE, asked
    with pytest.raises(LinkLost):
        await driver.connect(handle)
    assert (await driver.status()).problem


async def test_a_node_is_unhealthy_while_its_engine_is_stopped(mortal: Node) -> None:
    handle, link = await started(mortal.driver, spec())
    await printed(mortal.driver, link, "open('kept', 'w').write('kept')")
    mortal.engine.stop()
    try:
        await link.closed
        await refused(mortal, handle)
    finally:
        mortal.engine.start()
    assert (await mortal.driver.status()).problem is None
    assert await mortal.driver.handles() == [handle]
    assert (await mortal.driver.observe(handle)).state is State.EXITED
    workspace = mortal.driver.workspaces.of(handle)
    await mortal.driver.destroy(handle)
    _, link = await started(mortal.driver, spec(workspace=workspace))
    assert await printed(mortal.driver, link, "print(open('kept').read())") == "kept"
    link.close()


async def test_calls_time_out_when_the_engine_hangs(mortal: Node) -> None:
    handle, link = await started(mortal.driver, spec())
    settings = DockerSettings(url=mortal.engine.url, image=PYTHON, timeout=timedelta(seconds=10))
    hasty = DockerDriver(mortal.data_dir, settings, LinkSettings(), LocalSettings())
    try:
        await hasty.open()
        mortal.engine.pause()
        seen, status, made = await asyncio.gather(
            hasty.observe(handle), hasty.status(), hasty.ensure(spec()), return_exceptions=True
        )
        assert seen == Observation(State.UNKNOWN)
        assert isinstance(status, NodeStatus)
        assert "does not answer" in str(status.problem)
        assert isinstance(made, TemporaryError)
        assert made.code == UNAVAILABLE
        # Running instances do not need it.
        assert await printed(mortal.driver, link, "print(1)") == "1"
    finally:
        mortal.engine.resume()
        await hasty.close()
    assert (await mortal.driver.status()).problem is None
    assert (await mortal.driver.observe(handle)).state is State.RUNNING
    link.close()


async def test_an_engine_crash_during_a_start_leaves_nothing_behind(mortal: Node) -> None:
    begun = asyncio.get_running_loop().time()
    await mortal.driver.ensure(spec())
    whole = asyncio.get_running_loop().time() - begun
    for part in (0.1, 0.5, 0.8):
        making = asyncio.create_task(mortal.driver.ensure(spec()))
        await asyncio.wait([making], timeout=whole * part)
        await asyncio.to_thread(mortal.engine.crash)
        (outcome,) = await asyncio.gather(making, return_exceptions=True)
        await asyncio.to_thread(mortal.engine.start)
        assert isinstance(outcome, (Handle, TemporaryError)), outcome
        for handle in await mortal.driver.handles():
            await mortal.driver.destroy(handle)
        for workspace in await mortal.driver.workspaces.names():
            await mortal.driver.workspaces.discard(workspace)
        assert mortal.engine.containers() == []
        assert list((mortal.data_dir / "node" / "instances").iterdir()) == []
        assert await mortal.driver.handles() == []


async def test_a_closed_engine_connection_is_not_reported_as_a_failed_instance(
    mortal: Node,
) -> None:
    reference = build(
        mortal.engine,
        "atoll-test/slow:1",
        f"FROM {SHELL}",
        "COPY python3 /usr/local/bin/python3",
        python3="#!/bin/sh\nexec sleep infinity\n",
    )
    making = asyncio.create_task(mortal.driver.ensure(spec(template=template(image=reference))))

    async def runs() -> bool:
        return bool(mortal.engine.containers(status=["running"]))

    await until(runs, "its container")
    await asyncio.to_thread(mortal.engine.crash)
    try:
        with pytest.raises(TemporaryError) as caught:
            await making
        assert caught.value.code == UNAVAILABLE
    finally:
        mortal.engine.start()


async def test_opening_a_driver_without_an_engine_fails_with_the_socket_path(
    tmp_path: Path,
) -> None:
    settings = DockerSettings(url=f"unix://{tmp_path}/nothing.sock")
    driver = DockerDriver(tmp_path / "data", settings, LinkSettings(), LocalSettings())
    with pytest.raises(TemporaryError) as caught:
        await driver.open()
    assert caught.value.code == UNAVAILABLE
    assert "nothing.sock" in caught.value.message
    await driver.close()


# Limits


@on("docker")
async def test_a_memory_limit_below_usage_is_refused_and_changes_nothing(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    code = "held = bytearray(80 << 20)\nprint('on', flush=True)\nimport sys; sys.stdin.readline()"
    output = RunOutput()
    request = job(node.driver, code, stdin_open=True)
    running = asyncio.create_task(run_over(link, request, output))

    async def begun() -> bool:
        return b"on" in output.stdout

    await until(begun, "its first word")
    if await resizing_of(node.driver).resize(handle, replace(LIMITS, memory=40 * MiB)):
        pytest.skip("the kernel makes room here, by ending what has too much")
    await link.call("stdin", id=request["id"], data="Cg==", end=True)
    assert (await running)["exit_code"] == 0
    assert await resizing_of(node.driver).resize(handle, LIMITS)
    link.close()
    await node.driver.destroy(handle)
    assert not await resizing_of(node.driver).resize(handle, LIMITS)


# Images


@on("docker")
async def test_the_error_contains_the_output_of_a_failing_interpreter(node: Node) -> None:
    words = "this interpreter is from another century"
    reference = build(
        node.engine,
        "atoll-test/broken:1",
        f"FROM {SHELL}",
        "COPY python3 /usr/local/bin/python3",
        python3=f"#!/bin/sh\necho {words} >&2\nexit 1\n",
    )
    with pytest.raises(PermanentError, match=words) as caught:
        await node.driver.ensure(spec(template=template(image=reference)))
    assert caught.value.code == "instance_failed"
    assert await node.driver.handles() == []
    assert await node.alone()


@on("docker")
async def test_the_error_names_a_missing_image(node: Node) -> None:
    reference = f"atoll-test/{ids.instance_id().lower()}:1"
    assert not await node.driver.images.is_built(template(image=reference))
    with pytest.raises(TemporaryError, match=reference) as caught:
        await node.driver.ensure(spec(template=template(image=reference)))
    assert caught.value.code == "image_missing"
    assert await node.driver.handles() == []
    # Other instances can be started.
    assert (await node.driver.status()).problem is None


async def settled(node: Node, handle: Handle) -> bool:
    return (await node.driver.observe(handle)).state is State.EXITED


@on("docker")
async def test_an_ephemeral_instance_ends_with_its_driver(node: Node) -> None:
    ephemeral = await node.driver.ensure(spec(ephemeral=True))
    kept = await node.driver.ensure(spec())
    await node.take_over()
    await until(lambda: settled(node, ephemeral), "the end of the ephemeral one")
    assert (await node.driver.observe(kept)).state is State.RUNNING
