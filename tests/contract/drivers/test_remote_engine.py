"""
Engines that share no directory with this machine, or whose containers share no socket.

The link is a relay in the container, and workspaces are volumes of the engine. Everything else in
the contract is the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from atoll.drivers.docker import container_config, exec_link
from atoll.drivers.docker.driver import REMAPPED_UIDS, DockerDriver
from atoll.drivers.docker.node_identity import NAME_FILE
from atoll.errors import AtollError, InvalidRequest, NotFound, PermanentError, TemporaryError
from atoll.executor.connection import Connection
from atoll.executor.event_loop import Loop
from atoll.link.client import Link
from atoll.link.errors import ExecutorError, LinkLost
from atoll.model.instance import State
from atoll.model.volume import LOCAL, S3, Volume, VolumeMount
from atoll.protocol import frames
from atoll.settings import DockerSettings, LinkSettings, LocalSettings
from tests.contract.drivers.conftest import (
    LIMITS,
    MiB,
    Node,
    RunOutput,
    job,
    make_driver,
    on,
    opened,
    printed,
    spec,
    started,
    template,
)
from tests.contract.drivers.parts import pausing_of, resizing_of
from tests.runs import run_over
from tests.servers.docker import REMAPPED, Dockerd
from tests.servers.images import PYTHON, Archives

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

RELAYED = ("remote", "gvisor")
IS_RELAY = f"open('/proc/%s/cmdline' % p).read().endswith('{exec_link.SOCKET_NAME}\\0')"
RELAYS = f"[int(p) for p in os.listdir('/proc') if p.isdigit() and {IS_RELAY}]"


async def several_mebibytes(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 300_000):
        yield data[start : start + 300_000]


class FirstOutput(RunOutput):
    """Sets an event at the first output."""

    def __init__(self) -> None:
        super().__init__()
        self.came = asyncio.Event()

    def output(self, sequence: int, channel: int, data: bytes) -> None:
        super().output(sequence, channel, data)
        self.came.set()


@on("remote", "gvisor", "docker")
async def test_large_files_are_transferred_both_ways_on_two_links_at_once(node: Node) -> None:
    handle, one = await started(node.driver, spec())
    two = await node.driver.connect(handle)
    content = [os.urandom(6 * MiB), os.urandom(5 * MiB)]
    written = await asyncio.gather(
        one.write("a", several_mebibytes(content[0])), two.write("b", several_mebibytes(content[1]))
    )
    assert [entry["size"] for entry in written] == [6 * MiB, 5 * MiB]

    async def digest(link: Link, path: str) -> str:
        _, pieces = await link.read(path)
        found = hashlib.sha256()
        async for piece in pieces:
            found.update(piece)
        return found.hexdigest()

    wanted = [hashlib.sha256(data).hexdigest() for data in content]
    assert list(await asyncio.gather(digest(two, "a"), digest(one, "b"))) == wanted
    code = "import hashlib; print(hashlib.sha256(open('a', 'rb').read()).hexdigest())"
    assert await printed(node.driver, one, code) == wanted[0]
    one.close()
    two.close()


@on(*RELAYED)
async def test_a_slow_reader_blocks_no_other_stream_and_buffers_stay_small(
    node: Node,
) -> None:
    handle, slow = await started(node.driver, spec())
    other = await node.driver.connect(handle)
    data = os.urandom(8 * MiB)
    await other.write("large", several_mebibytes(data))
    _, pieces = await slow.read("large")
    first = await anext(pieces)
    # The transfer stops after one window, and the link can be used for other requests.
    assert await printed(node.driver, slow, "print('free')") == "free"
    assert await printed(node.driver, other, "print('free')") == "free"
    rest = b"".join([piece async for piece in pieces])
    assert first + rest == data
    slow.close()
    other.close()


@on(*RELAYED)
async def test_a_run_survives_a_lost_link_and_a_new_link_attaches(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    code = (
        "import sys, time\nfor n in range(60):\n    print(n, flush=True); time.sleep(0.01)\n"
        "    if n == 30: sys.stdin.readline()"
    )
    wanted, received = job(node.driver, code, stdin_open=True), FirstOutput()
    running = asyncio.create_task(run_over(link, wanted, received))
    await asyncio.wait_for(received.came.wait(), 30)

    link._transport.abort()
    with pytest.raises(LinkLost):
        await running
    link = await node.driver.connect(handle)
    attached = asyncio.create_task(link.attach(wanted["id"], received.last, received))
    await link.call("stdin", id=wanted["id"], data="Cg==", eof=True)
    result = await attached
    assert result["exit_code"] == 0
    assert received.stdout.decode().split() == [str(number) for number in range(60)]
    link.close()


@on("remote")
async def test_a_killed_relay_is_a_lost_link(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    path = f"/containers/{handle.data['container']}/top"
    about = {"ps_args": "-eww -o pid,args"}
    shown = node.engine.ask("GET", path, params=about).json()["Processes"]
    pids = [int(pid) for pid, command in shown if command.endswith(exec_link.SOCKET_NAME)]
    (pid,) = pids
    os.kill(pid, 9)
    await asyncio.wait_for(link.closed, 30)
    assert not link.alive
    again = await node.driver.connect(handle)
    assert await printed(node.driver, again, "print('again')") == "again"
    again.close()


@on(*RELAYED)
async def test_many_concurrent_links_work_and_leave_no_relay(node: Node) -> None:
    handle, first = await started(node.driver, spec())
    others = await asyncio.gather(*(node.driver.connect(handle) for _ in range(8)))
    assert await asyncio.gather(*(other.call("stat", path=".") for other in others))
    for other in others:
        other.close()
    code = f"""
import os, time
def relays():
    found = []
    for p in os.listdir('/proc'):
        try:
            if p.isdigit() and {IS_RELAY}: found.append(p)
        except OSError: pass
    return len(found)
while relays() > 1: time.sleep(0.05)
print(relays())
"""
    assert await printed(node.driver, first, code) == "1"
    first.close()


@on(*RELAYED)
async def test_a_link_survives_a_pause_but_none_can_be_opened_during_it(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    await pausing_of(node.driver).pause(handle)
    assert (await node.driver.observe(handle)).state is State.PAUSED
    with pytest.raises(LinkLost):
        await node.driver.connect(handle)
    waiting = asyncio.create_task(printed(node.driver, link, "print('on')"))
    await pausing_of(node.driver).resume(handle)
    assert await waiting == "on"
    link.close()


# User code

HOSTILE = f"""
import errno, os, socket, struct, sys
sys.path.insert(0, '/run/atoll/executor.pyz')
from atoll_executor.protocol import frames

def asked(show, token):
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(10)
    try:
        link.connect(chr(0) + '{exec_link.SOCKET_NAME}')
        show(link)
        link.sendall(frames.encode_json(0, frames.HELLO, {{'versions': [1], 'token': token}}))
        link.sendall(frames.encode_json(1, frames.OPEN, {{'op': 'shutdown'}}))
        return link.recv(1)
    except OSError as error:
        return errno.errorcode[error.errno].encode() if error.errno else b'slow'

def credentials(uid):
    who = struct.pack('3i', os.getpid(), uid, os.getgid())
    return lambda link: link.sendmsg([b'x'], [(socket.SOL_SOCKET, 2, who)])

refused = {{b'', b'EPIPE', b'ECONNRESET', b'EPERM', b'ECONNREFUSED'}}
for name, show in [('nobody', lambda link: None), ('itself', credentials(os.getuid())),
                   ('relay', credentials({exec_link.RELAY_UID})),
                   ('handles', lambda link: link.sendmsg(
                       [b'x'], [(socket.SOL_SOCKET, 1, struct.pack('3i', 0, 1, 2))]))]:
    for token in ('', '0' * 64):
        said = asked(show, token)
        assert said in refused, (name, said)

held = [socket.socket(socket.AF_UNIX) for _ in range(200)]
for one in held:
    one.settimeout(1)
    try: one.connect(chr(0) + '{exec_link.SOCKET_NAME}')
    except OSError: pass
"""

FLOOD = f"""
import os, socket
for _ in range(3): os.fork()
print('flooding', flush=True)
held = []
while True:
    one = socket.socket(socket.AF_UNIX)
    one.setblocking(False)
    try: one.connect(chr(0) + '{exec_link.SOCKET_NAME}')
    except OSError: pass
    held.append(one)
    del held[:-50]
"""
TOUCH = f"""
import ctypes, os, sys
(relay,) = {RELAYS}
def refused(work):
    try: work()
    except OSError as error: return type(error).__name__
    return 'done'
print(refused(lambda: os.kill(relay, 9)), refused(lambda: os.kill(relay, 19)))
print(refused(lambda: open('/proc/%d/mem' % relay, 'rb')))
print(refused(lambda: open('/proc/%d/environ' % relay, 'rb').read()))
print(refused(lambda: os.listdir('/proc/%d/fd' % relay)))
print(refused(lambda: os.setuid({exec_link.RELAY_UID})))
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(16, relay, 0, 0))
os.kill(-1, 0)
"""


@on(*RELAYED)
async def test_the_executor_ignores_user_code_whatever_it_presents(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    output = RunOutput()
    result = await run_over(link, job(node.driver, HOSTILE), output)
    assert result["exit_code"] == 0, output.pieces
    # It still runs and accepts links.
    again = await node.driver.connect(handle)
    assert await printed(node.driver, again, "print('well')") == "well"
    link.close()
    again.close()


@on(*RELAYED)
async def test_user_code_that_floods_the_executors_socket_blocks_no_link(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    wanted, received = job(node.driver, FLOOD), FirstOutput()
    running = asyncio.create_task(run_over(link, wanted, received))
    await asyncio.wait_for(received.came.wait(), 30)
    other = await node.driver.connect(handle)
    assert await other.call("stat", path=".")
    other.close()
    await link.call("cancel", id=wanted["id"], grace=0.0)
    await running
    assert await printed(node.driver, link, "print('well')") == "well"
    link.close()


@on("remote")
async def test_user_code_cannot_touch_the_relay_or_become_its_user(node: Node) -> None:
    _, link = await started(node.driver, spec())
    output = await printed(node.driver, link, TOUCH)
    denied = "PermissionError"
    lines = [f"{denied} {denied}", denied, denied, denied, denied, "-1"]
    assert output.split("\n") == lines
    link.close()


@on("gvisor")
async def test_user_code_in_gvisor_cannot_end_the_relay(node: Node) -> None:
    _, link = await started(node.driver, spec())
    output = await printed(node.driver, link, TOUCH)
    assert output.split("\n")[0] == "PermissionError PermissionError"
    assert output.split("\n")[-1] == "-1"
    assert await printed(node.driver, link, "print('on')") == "on"
    link.close()


@on("remote")
async def test_requests_without_the_token_are_refused(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    driver = node.driver
    assert isinstance(driver, DockerDriver)
    container = str(handle.data["container"])
    shown = node.engine.inspect(container)
    entry = shown["Config"]["Entrypoint"]
    for token in ("", "0" * 64):
        with pytest.raises(ExecutorError) as refused:
            await driver._exec_links.connect(
                container,
                driver._exec_links.start_relay(
                    container, entry[: entry.index("-I")], "/run/atoll/executor.pyz"
                ),
                LinkSettings(),
                timeout=timedelta(seconds=30),
                token=token,
            )
        assert refused.value.code == "unauthenticated"
    # `docker inspect` shows neither the configuration nor the token.
    assert driver._identity.token(handle.instance_id) not in str(shown)
    assert await printed(driver, link, "print('well')") == "well"
    link.close()


async def test_a_request_before_an_accepted_hello_closes_the_connection() -> None:
    ours, theirs = socket.socketpair()
    loop, asked = Loop(), []
    theirs.setblocking(False)
    Connection(
        loop,
        theirs,
        lambda connection, hello: False,
        lambda stream, request: asked.append(request),
        lambda connection: setattr(loop, "running", False),
    )
    ours.sendall(frames.encode_json(0, frames.HELLO, {"token": "wrong"}))
    ours.sendall(frames.encode_json(1, frames.OPEN, {"op": "shutdown"}))
    loop.run()
    loop.close()
    assert asked == []
    assert ours.recv(1) == b""
    ours.close()


# Workspaces


@on("remote")
async def test_a_new_driver_finds_workspaces_in_volumes(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    await printed(node.driver, link, "open('kept', 'w').write('one')")
    code = "import os; s = os.stat('/workspace'); print(s.st_uid, s.st_gid, oct(s.st_mode))"
    uid = handle.data["uid"]
    assert await printed(node.driver, link, code) == f"{uid} {uid} 0o40700"
    other = await node.driver.ensure(spec())
    assert len({uid, other.data["uid"], container_config.UID}) == 3
    await node.driver.destroy(other)
    await node.driver.workspaces.discard(node.driver.workspaces.of(other))
    link.close()
    driver = await node.take_over()
    assert await driver.handles() == [handle]
    again = await driver.connect(handle)
    assert await printed(driver, again, "print(open('kept').read())") == "one"
    again.close()
    await driver.destroy(handle)
    workspace = driver.workspaces.of(handle)
    assert await driver.workspaces.names() == [workspace]
    other, link = await started(driver, spec(workspace=workspace))
    assert await printed(driver, link, "print(open('kept').read())") == "one"
    link.close()
    with pytest.raises(TemporaryError) as busy:
        await driver.workspaces.discard(workspace)
    assert busy.value.code == "workspace_busy"
    await driver.destroy(other)
    await driver.workspaces.discard(workspace)
    await driver.workspaces.discard(workspace)
    assert await driver.workspaces.names() == []
    with pytest.raises(NotFound) as lost:
        await driver.ensure(spec(workspace=workspace))
    assert lost.value.code == "workspace_lost"


@on("remote")
async def test_code_can_read_but_not_change_the_executor(node: Node) -> None:
    _, link = await started(node.driver, spec())
    code = """
import os
for path in ('/run/atoll/executor.pyz', '/run/atoll/new', '/run/atoll/inside/lib/atoll_session.py'):
    try: open(path, 'wb'); print('written', path)
    except OSError: pass
import atoll_session
print(os.access('/run/atoll/inside/bin/atoll-session', os.X_OK))
"""
    assert await printed(node.driver, link, code) == "True"
    link.close()


@on("remote")
async def test_a_node_with_volumes_refuses_what_it_does_not_support(node: Node) -> None:
    driver = node.driver
    assert not driver.workspaces.can_copy
    assert "disk_quota" in driver.capabilities.missing
    for part in ("volumes", "packages"):
        assert getattr(driver, part) is None
        assert "volumes of a Docker engine" in driver.capabilities.unavailable[part]
    for kind, code in ((LOCAL, "isolation_unavailable"), (S3, "mount_unavailable")):
        volume = Volume(id="v", created_at=template().created_at, size=0, kind=kind, node_id=None)
        with pytest.raises(InvalidRequest) as refused:
            await driver.ensure(replace(spec(), volumes=((volume, VolumeMount("v", "/v")),)))
        assert refused.value.code == code
    assert await driver.workspaces.copy("nothing", "new") is False


@on("remote")
async def test_leftovers_of_a_start_do_not_block_removing_a_workspace(node: Node) -> None:
    handle = await node.driver.ensure(spec())
    await node.driver.destroy(handle)
    workspace = node.driver.workspaces.of(handle)
    name = (node.data_dir / "node" / NAME_FILE).read_text()
    about = {
        "Image": "atoll-workspace:1",
        "Cmd": ["/nothing"],
        "Labels": {"atoll.node": name, "atoll.draft": ""},
        "HostConfig": {"Binds": [f"atoll-{workspace}:/workspace"]},
    }
    # Not a scratch container by its name: it only inherited the label.
    other = node.engine.ask("POST", "/containers/create", json=about).json()["Id"]
    node.engine.ask("POST", "/containers/create", params={"name": "atoll-draft-0"}, json=about)
    with pytest.raises(TemporaryError) as busy:
        await node.driver.workspaces.discard(workspace)
    assert busy.value.code == "workspace_busy"
    node.engine.remove(other)
    await node.driver.workspaces.discard(workspace)
    assert await node.driver.workspaces.names() == []
    assert await node.alone()


@on("remote")
async def test_a_removed_shared_volume_is_restored_for_concurrent_starts(
    node: Node,
) -> None:
    (shared,) = (
        one["Name"]
        for one in node.engine.ask("GET", "/volumes").json()["Volumes"]
        if "atoll.shared" in (one["Labels"] or {})
        and one["Name"].startswith(f"atoll-{(node.data_dir / 'node' / NAME_FILE).read_text()}-")
    )
    node.engine.ask("DELETE", f"/volumes/{shared}")
    for _, link in await asyncio.gather(*(started(node.driver, spec()) for _ in range(3))):
        assert await printed(node.driver, link, "print('well')") == "well"
        link.close()


@on("remote")
async def test_the_load_is_the_sum_of_the_containers_limits(node: Node) -> None:
    idle = (await node.driver.status()).load
    handle = await node.driver.ensure(spec())
    busy = (await node.driver.status()).load
    assert (idle.mem_usage, idle.cpu_usage) == (0.0, 0.0)
    assert busy.mem_usage * busy.mem_total == pytest.approx(LIMITS.memory)
    assert await resizing_of(node.driver).resize(
        handle, LIMITS.__class__(1.0, 256 * MiB, 16 * MiB, 32)
    )
    larger = (await node.driver.status()).load
    assert larger.mem_usage * busy.mem_total == pytest.approx(256 * MiB)
    used = await node.driver.limits.memory_used(handle)
    assert used is not None
    assert 0 < used < LIMITS.memory


# Connections to an engine


def driver_at(place: Path, **where: Any) -> DockerDriver:
    settings = DockerSettings(image=PYTHON, **where)
    return DockerDriver(place, settings, LinkSettings(), LocalSettings())


@asynccontextmanager
async def holding(engine: Dockerd, path: Path) -> AsyncIterator[str]:
    """The address of a proxy whose connections stay open when the engine closes them."""
    tasks: set[asyncio.Task[Any]] = set()

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            target.write(data)
            await target.drain()

    async def serve(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        far, there = await asyncio.open_unix_connection(engine.url.removeprefix("unix://"))
        answers = asyncio.create_task(copy(far, target))
        tasks.add(answers)
        try:
            await copy(source, there)
        except asyncio.CancelledError:
            pass  # The server would log it.
        finally:
            there.transport.abort()
            target.transport.abort()

    async with await asyncio.start_unix_server(serve, path):
        try:
            yield f"unix://{path}"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_link_ends_with_its_container_even_if_the_connection_stays_open(
    dockerd: Dockerd, tmp_path: Path
) -> None:
    async with (
        holding(dockerd, tmp_path / "s") as url,
        opened(driver_at(tmp_path, url=url, storage="volumes")) as driver,
    ):
        handle, link = await started(driver, spec())
        _, living = await started(driver, spec())
        running = asyncio.create_task(run_over(link, job(driver, "input()"), RunOutput()))
        dockerd.ask("POST", f"/containers/{handle.data['container']}/kill")
        with pytest.raises(LinkLost):
            await asyncio.wait_for(running, 60)
        assert await printed(driver, living, "print('well')") == "well"
        living.close()


async def trouble(driver: DockerDriver) -> AtollError:
    try:
        with pytest.raises(AtollError) as refused:
            await driver.open()
    finally:
        await driver.close()
    return refused.value


async def test_engine_and_driver_verify_each_others_certificates(
    dockerd: Dockerd, tmp_path: Path
) -> None:
    right = dockerd.over_tls
    other = Dockerd(
        tmp_path, tls=True
    )  # Not started: it only makes certificates of another authority.
    try:
        for wrong in (
            right | {"tls_ca": str(other.ca)},
            right | {"tls_cert": str(other.cert), "tls_key": str(other.key)},
            {"url": right["url"], "tls_ca": right["tls_ca"]},
            {"url": right["url"]},
        ):
            error = await trouble(driver_at(tmp_path / "data", **wrong))
            assert error.code in ("engine_unavailable", "engine_refused"), error.message
        error = await trouble(driver_at(tmp_path / "data", **right | {"tls_cert": "/nothing"}))
        assert error.code == "engine_insecure"
        error = await trouble(driver_at(tmp_path / "data", url="tcp://192.0.2.1:2375"))
        assert error.code == "engine_insecure"
        assert isinstance(error, PermanentError)
    finally:
        other.__exit__()
    async with opened(driver_at(tmp_path / "data", **right)) as driver:
        assert (await driver.status()).problem is None


async def test_directories_are_chosen_if_the_engine_sees_them(
    dockerd: Dockerd, tmp_path: Path
) -> None:
    for where, copies in (({"url": dockerd.url}, True), (dockerd.over_tls, False)):
        async with opened(driver_at(tmp_path / "data", **where)) as driver:
            assert driver.workspaces.can_copy is copies


async def test_volumes_are_chosen_for_an_engine_that_maps_users(
    image_archives: Archives, tmp_path: Path
) -> None:
    with Dockerd(tmp_path, remap=True) as engine:
        image_archives.load(engine)
        async with opened(driver_at(tmp_path / "data", url=engine.url)) as driver:
            assert not driver.workspaces.can_copy
            handle, link = await started(driver, spec())
            code = "import os; open('kept', 'w').write('x' * 7)"
            code += "; print(os.getuid(), os.access('/', 2))"
            uid = int(handle.data["uid"])
            assert uid in REMAPPED_UIDS
            assert await printed(driver, link, code) == f"{uid} False"
            first = engine.inspect(str(handle.data["container"]))["State"]["Pid"]
            assert os.stat(f"/proc/{first}").st_uid == REMAPPED + uid
            link.close()
            await driver.destroy(handle)
            _, link = await started(driver, spec(workspace=driver.workspaces.of(handle)))
            assert await printed(driver, link, "print(open('kept').read())") == "x" * 7
            link.close()


async def test_another_engine_has_no_containers_of_this_node(
    dockerd: Dockerd, tmp_path: Path
) -> None:
    """Two nodes on one engine do not touch each other's containers."""
    async with (
        opened(make_driver("remote", tmp_path / "one", dockerd.over_tls)) as one,
        opened(make_driver("remote", tmp_path / "two", dockerd.over_tls)) as two,
    ):
        await one.ensure(spec())
        assert await two.handles() == []
        assert await two.workspaces.names() == []
