"""Workspaces that are copied on the node."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from atoll.drivers.local.driver import LocalDriver
from atoll.drivers.shared import tree_copy
from atoll.errors import TemporaryError
from atoll.model.instance import State
from tests.contract.drivers.conftest import Node, printed, spec, started
from tests.contract.drivers.test_driver_contract import gone, until

if TYPE_CHECKING:
    from atoll.link.client import Link

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize(
        ("node", "copying"),
        [("local", "image"), ("local", "directory"), ("docker", "image")],
        indirect=True,
    ),
]

FILL = """
import os, socket
os.makedirs('a/b')
open('a/b/file', 'w').write('content')
open('script', 'w').write('#!/bin/sh'); os.chmod('script', 0o750)
os.utime('script', (1_000_000_000, 1_000_000_000))
os.link('a/b/file', 'again'); os.link('script', 'a/script')
os.symlink('/etc/passwd', 'out'); os.symlink('a/b', 'in'); os.symlink('nowhere', 'lost')
os.mkfifo('pipe'); socket.socket(socket.AF_UNIX).bind('socket')
with open('holes', 'wb') as f:
    f.truncate(8 << 20); f.seek(4 << 20); f.write(b'x' * 4096)
os.mkdir('closed'); open('closed/in', 'w').write('in'); os.chmod('closed', 0)
open('secret', 'w').write('s'); os.chmod('secret', 0)
os.mkdir('deep'); here = os.open('deep', os.O_RDONLY)
for n in range(700):
    os.mkdir('d' * 20, dir_fd=here); below = os.open('d' * 20, os.O_RDONLY, dir_fd=here)
    os.close(here); here = below
os.utime('a', (900_000_000, 900_000_000))
"""
TELL = """
import os, stat
def show(path):
    s = os.lstat(path)
    link = os.readlink(path) if stat.S_ISLNK(s.st_mode) else ''
    # Who watches the size of a directory opens up what is closed there, at any time.
    mode = stat.S_IFMT(s.st_mode) if path == 'closed' else s.st_mode
    return (path, oct(mode), s.st_size, s.st_nlink, int(s.st_mtime), link,
            s.st_blocks < 4096, s.st_uid == os.getuid())
names = ['a', 'a/b', 'a/b/file', 'script', 'again', 'a/script', 'out', 'in', 'lost', 'holes',
         'closed', 'secret']
for name in names: print(*show(name))
print(open('a/b/file').read(), os.path.samefile('again', 'a/b/file'))
print(os.path.samefile('script', 'a/script'), sum(open('holes', 'rb').read()))
os.chmod('closed', 0o700); os.chmod('secret', 0o600)
print(open('closed/in').read(), open('secret').read())
here, depth = os.open('deep', os.O_RDONLY), 0
while os.listdir(here):
    below = os.open('d' * 20, os.O_RDONLY, dir_fd=here); os.close(here); here = below; depth += 1
print(depth)
os.chmod('closed', 0); os.chmod('secret', 0)
"""


@pytest.fixture
def copying(request: pytest.FixtureRequest, node: Node) -> Node:
    """A node whose workspaces are images, or directories."""
    driver = node.driver
    assert driver.workspaces.can_copy
    if isinstance(driver, LocalDriver):
        if request.param == "image" and "disk_quota" not in driver.capabilities.provides:
            pytest.skip("workspaces are directories here")
        driver._files.images = request.param == "image"
    return node


async def copied(node: Node, workspace: str, name: str = "copy") -> Link:
    assert await node.driver.workspaces.copy(workspace, name)
    _, link = await started(node.driver, spec(workspace=name))
    return link


async def test_a_copy_contains_everything_in_the_workspace(copying: Node) -> None:
    handle, link = await started(copying.driver, spec())
    await printed(copying.driver, link, FILL)
    output = await printed(copying.driver, link, TELL)
    link.close()
    workspace = copying.driver.workspaces.of(handle)
    await copying.driver.destroy(handle)
    for _ in range(2):
        assert await copying.driver.workspaces.copy(workspace, "copy")
    assert sorted(await copying.driver.workspaces.names()) == sorted([workspace, "copy"])
    _, link = await started(copying.driver, spec(workspace="copy"))
    assert await printed(copying.driver, link, TELL) == output
    # Another's from here on.
    await printed(copying.driver, link, "open('a/b/file', 'w').write('mine'); open('new', 'w')")
    link.close()
    _, first = await started(copying.driver, spec(workspace=workspace))
    assert await printed(copying.driver, first, TELL) == output
    first.close()


async def test_a_copy_of_a_copy_has_its_own_host_uid(copying: Node) -> None:
    driver = copying.driver
    if "own_uid" not in driver.capabilities.provides:
        pytest.skip("instances share a uid here")
    handle, link = await started(driver, spec())
    await printed(driver, link, "open('mine', 'w').write('1')")
    link.close()
    await driver.destroy(handle)
    names = [driver.workspaces.of(handle), "second", "third"]
    uids = set()
    for name, following in zip(names, [*names[1:], ""], strict=True):
        handle, link = await started(driver, spec(workspace=name))
        code = "import os; print(os.stat('mine').st_uid == os.stat('.').st_uid == os.getuid())"
        assert await printed(driver, link, code) == "True"
        await printed(driver, link, f"open('mine', 'a').write('2'); open('{name}', 'w')")
        uids.add(os.stat(f"/proc/{copying.pid_1(handle)}").st_uid)
        uids.add(os.stat(f"/proc/{copying.pid_1(handle)}/root/workspace/{name}").st_uid)
        uids.add(os.stat(f"/proc/{copying.pid_1(handle)}/root/workspace/mine").st_uid)
        link.close()
        await driver.stop(handle, grace=timedelta(0))
        if following:
            assert await driver.workspaces.copy(name, following)
    assert len(uids - {0}) == 3


async def test_a_copy_of_a_paused_instance_contains_the_last_writes(copying: Node) -> None:
    driver = copying.driver
    handle, link = await started(driver, spec())
    workspace = driver.workspaces.of(handle)
    await printed(driver, link, "open('last', 'w').write('x' * 1_000_000)")
    with pytest.raises(TemporaryError) as caught:
        await driver.workspaces.copy(workspace, "copy")
    assert caught.value.code == "workspace_busy"
    assert await driver.workspaces.names() == [workspace]
    if driver.pausing is None:
        pytest.skip("instances of this node cannot be paused")
    await link.call("sync")
    await printed(driver, link, "open('later', 'w').write('y' * 1_000_000)")
    await driver.pausing.pause(handle)
    other = await copied(copying, workspace)
    code = "print(open('last').read() == 'x' * 1_000_000, open('later').read() == 'y' * 1_000_000)"
    assert await printed(driver, other, code) == "True True"
    await driver.pausing.resume(handle)
    assert await printed(driver, link, "print(len(open('later').read()))") == "1000000"
    other.close()
    link.close()


async def test_unacknowledged_results_are_not_copied(copying: Node) -> None:
    driver = copying.driver
    handle, link = await started(driver, spec())
    await printed(driver, link, "print('kept in the journal')")
    link.close()
    workspace = driver.workspaces.of(handle)
    await driver.destroy(handle)
    other = await copied(copying, workspace)
    assert other.hello["runs"] == []
    other.close()


async def test_a_workspace_of_a_killed_instance_can_be_copied(
    copying: Node,
) -> None:
    driver = copying.driver
    handle, link = await started(driver, spec())
    await printed(driver, link, "import os\nwith open('f', 'w') as f: f.write('f'); os.fsync(f)")
    link.close()
    os.kill(copying.pid_1(handle), signal.SIGKILL)
    await until(lambda: gone(copying, handle), "its end")
    other = await copied(copying, driver.workspaces.of(handle))
    assert await printed(driver, other, "print(open('f').read())") == "f"
    other.close()


async def test_a_missing_workspace_cannot_be_copied(copying: Node) -> None:
    assert not await copying.driver.workspaces.copy("nothing", "copy")
    assert await copying.driver.workspaces.names() == []


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, "node_full"), (errno.EIO, "workspace_not_copied")]
)
async def test_a_failed_copy_leaves_nothing(
    copying: Node, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    driver = copying.driver
    handle, link = await started(driver, spec())
    await printed(driver, link, "open('f', 'w').write('f')")
    link.close()
    await driver.destroy(handle)
    workspace = driver.workspaces.of(handle)

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "copy_file_range", fail)
        patch.setattr(tree_copy, "share_blocks", lambda *_: False)
        with pytest.raises(TemporaryError) as caught:
            await driver.workspaces.copy(workspace, "copy")
    assert caught.value.code == code
    assert await driver.workspaces.names() == [workspace]
    link = await copied(copying, workspace)
    assert await printed(driver, link, "print(open('f').read())") == "f"
    link.close()


@pytest.mark.parametrize("turns", [0, 1, 5, 20])
async def test_a_cancelled_copy_is_finished_by_the_next_call(copying: Node, turns: int) -> None:
    driver = copying.driver
    handle, link = await started(driver, spec())
    await printed(driver, link, "for n in range(300): open(f'{n}', 'w').write(str(n))")
    link.close()
    await driver.destroy(handle)
    workspace = driver.workspaces.of(handle)
    making = asyncio.create_task(driver.workspaces.copy(workspace, "copy"))
    for _ in range(turns):
        await asyncio.sleep(0.001)
    making.cancel()
    await asyncio.gather(making, return_exceptions=True)
    link = await copied(copying, workspace)
    code = "print(sum(int(open(f'{n}').read()) for n in range(300)))"
    assert await printed(driver, link, code) == str(sum(range(300)))
    link.close()
    for found in await driver.handles():
        assert (await driver.observe(found)).state is State.RUNNING
