"""Workspaces of containers in directories: limits, mounts, and workspaces of earlier versions."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import pytest

from atoll.drivers.docker import container_config
from atoll.drivers.docker.executor_files import IMAGE_SIZE
from atoll.drivers.shared.disk_images import make_file_system
from atoll.drivers.shared.mount_points import mount_points
from atoll.drivers.shared.mount_syscalls import mount_image
from atoll.drivers.shared.workspace_files import IMAGE
from atoll.errors import PermanentError
from atoll.model.instance import Handle
from atoll.model.volume import LOCAL, Volume, VolumeMount
from tests import unprivileged
from tests.contract.drivers.conftest import (
    LIMITS,
    MiB,
    Node,
    on,
    printed,
    spec,
    started,
    template,
)
from tests.contract.drivers.parts import volumes_of
from tests.contract.drivers.test_docker_isolation import build
from tests.servers.images import PYTHON

pytestmark = [pytest.mark.anyio, on("docker")]

FLOOD = """#!/usr/local/bin/python3
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
KEEP_SIZE, taken = 1, {}
sys.stdin.readline()
for place in ('/run/atoll/link', '/run/atoll/journal', '/workspace'):
    taken[place] = 0
    for number in range(200):
        fd = os.open(f'{place}/f{number}', os.O_CREAT | os.O_RDWR)
        os.unlink(f'{place}/f{number}')
        if libc.fallocate(fd, KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(1 << 20)):
            break
        taken[place] += 1
print(*('%s=%d' % one for one in taken.items()), file=sys.stderr)
"""


async def test_a_hostile_image_cannot_exceed_the_disk_limit(node: Node) -> None:
    """The image's interpreter is the first process and can write wherever the executor can."""
    lines = (f"FROM {PYTHON}", "COPY python /opt/python")
    reference = build(node.engine, "atoll-test/flood:1", *lines, python=FLOOD)
    flooding = spec(template=template(image=reference, python="/opt/python"))

    with pytest.raises(PermanentError) as caught:
        await node.driver.ensure(flooding)

    assert caught.value.code == "instance_failed"
    taken = dict(re.findall(r"(/\S+)=(\d+)", caught.value.message))
    own = int(taken["/run/atoll/link"]) + int(taken["/run/atoll/journal"])
    assert 0 < own * MiB < IMAGE_SIZE
    assert 0 < int(taken["/workspace"]) * MiB < LIMITS.disk
    assert (await node.driver.handles()) == []


async def test_read_only_volumes_allow_neither_devices_nor_setuid(node: Node) -> None:
    volume = Volume(
        id="shared", created_at=template().created_at, size=8 * MiB, kind=LOCAL, node_id=None
    )
    await volumes_of(node.driver).make(volume)
    mounts = (VolumeMount("shared", "/mnt/read", True), VolumeMount("shared", "/mnt/write", False))
    handle, link = await started(
        node.driver, spec(volumes=tuple((volume, mount) for mount in mounts))
    )
    code = """
import os
open('/mnt/write/file', 'w').write('1')
print(open('/mnt/read/file').read())
try:
    open('/mnt/read/file', 'w')
except OSError as error:
    print(error.strerror)
for line in open('/proc/self/mountinfo'):
    fields = line.split()
    if fields[4] in ('/mnt/read', '/mnt/write', '/workspace'):
        print(fields[4], *sorted({'ro', 'rw', 'nosuid', 'nodev'} & set(fields[5].split(','))))
"""
    output = (await printed(node.driver, link, code)).splitlines()
    assert output[:2] == ["1", "Read-only file system"]
    assert sorted(output[2:]) == [
        "/mnt/read nodev nosuid ro",
        "/mnt/write nodev nosuid rw",
        "/workspace nodev nosuid rw",
    ]
    link.close()
    await node.driver.destroy(handle)
    await volumes_of(node.driver).remove(volume)
    assert os.listdir(node.data_dir / "node" / "volumes") == []


async def test_all_mounts_are_removed_when_instances_are_destroyed(node: Node) -> None:
    handle = await node.driver.ensure(spec())
    assert len(mount_points(node.data_dir)) == 2
    await node.driver.destroy(handle)
    assert mount_points(node.data_dir) == []
    assert await node.driver.workspaces.names() == [node.driver.workspaces.of(handle)]


# Earlier versions


def earlier(node: Node, name: str) -> Path:
    """A workspace in a directory, with the uid that all workspaces had."""
    folder = node.data_dir / "node" / "workspaces" / name
    files, journal = folder / "files", folder / "journal"
    for directory in (folder, files, journal):
        directory.mkdir(mode=0o700)
    (files / "kept").write_text("from before")
    os.link(files / "kept", files / "again")
    (files / "closed").mkdir(mode=0)
    (journal / "0").write_bytes(b"a journal")
    (journal / "1").symlink_to("/etc/passwd")
    for path in (files, *files.iterdir(), journal):
        os.chown(path, container_config.UID, container_config.UID)
    record = {"name": name, "kind": "directory", "uid": container_config.UID, "size": LIMITS.disk}
    (folder / "workspace.json").write_text(json.dumps(record))
    return folder


CONTENT = """
import os
print(open('kept').read(), os.path.samefile('kept', 'again'), oct(os.stat('closed').st_mode))
print({os.lstat(name).st_uid for name in ('.', 'kept', 'closed')} == {os.getuid()})
print(sorted(set(os.listdir('.')) - {'.tmp'}))
"""
TOLD = "from before True 0o40000\nTrue\n['again', 'closed', 'kept']"


async def test_a_workspace_of_an_earlier_version_is_moved_into_an_image(node: Node) -> None:
    place = earlier(node, "before")

    handle, link = await started(node.driver, spec(workspace="before"))

    assert await printed(node.driver, link, CONTENT) == TOLD
    assert handle.data["uid"] != container_config.UID
    assert json.loads((place / "workspace.json").read_text())["kind"] == IMAGE
    assert sorted(entry.name for entry in place.iterdir()) == [
        "disk", "executor", "workspace.json",
    ]  # fmt: skip
    link.close()
    await node.driver.destroy(handle)
    handle, link = await started(node.driver, spec(workspace="before"))
    assert await printed(node.driver, link, CONTENT) == TOLD
    link.close()


async def test_files_beyond_a_watched_limit_are_kept(node: Node) -> None:
    place = earlier(node, "before")
    (place / "files" / "large").write_bytes(os.urandom(LIMITS.disk + MiB))

    _, link = await started(node.driver, spec(workspace="before"))

    code = "import os; print(os.stat('large').st_size)"
    assert int(await printed(node.driver, link, code)) == LIMITS.disk + MiB
    link.close()


async def test_an_interrupted_move_starts_again(node: Node) -> None:
    place = earlier(node, "before")
    (place / "top").mkdir()
    make_file_system(place / "disk", LIMITS.disk)
    mount_image(str(place / "disk"), str(place / "top"))
    (place / "top" / "kept").write_text("a part")

    _, link = await started(node.driver, spec(workspace="before"))

    assert await printed(node.driver, link, CONTENT) == TOLD
    assert not (place / "top").exists()
    link.close()


async def test_an_instance_of_an_earlier_version_has_watched_limits(node: Node) -> None:
    data: dict[str, str | int] = {"container": "x", "workspace": "before", "link": "socket"}
    limits, watch = node.driver.limits.executor_limits(Handle("inst_1", "docker", 1, data), LIMITS)
    assert watch["disk"] == LIMITS.disk
    # RLIMIT_NPROC would count the processes of all containers of that version: they share a uid.
    assert "NPROC" not in limits


# Engines that do not see what Atoll mounts

APART = """
import asyncio, json, sys
from pathlib import Path
import structlog
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
sys.path.insert(0, {checkout!r})
from tests.contract.drivers.conftest import LIMITS, make_driver, opened, printed, spec, started

async def main():
    async with opened(make_driver('docker', Path({data_dir!r}), {where!r})) as driver:
        handle, link = await started(driver, spec())
        told = {{
            'uid': handle.data['uid'],
            'inside': int(await printed(driver, link, 'import os; print(os.getuid())')),
            'watch': driver.limits.executor_limits(handle, LIMITS)[1],
            'missing': sorted(driver.capabilities.missing),
        }}
        print(json.dumps(told), flush=True)

asyncio.run(main())
"""


async def test_without_images_the_disk_limit_is_watched(node: Node, tmp_path: Path) -> None:
    """As if Atoll ran in a container: the engine does not see what it mounts."""
    code = APART.format(
        checkout=str(unprivileged.CHECKOUT), data_dir=str(tmp_path / "apart"), where=node.where
    )
    apart = await asyncio.create_subprocess_exec(
        "unshare", "--mount", "--propagation", "private", sys.executable, "-c", code,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await apart.communicate()
    assert apart.returncode == 0
    content = json.loads(output)
    assert content["missing"] == ["disk_quota"]
    assert content["watch"]["disk"] == LIMITS.disk
    assert content["uid"] == content["inside"] != container_config.UID
