"""How containers are confined, seen by the engine and by code inside."""

from __future__ import annotations

import io
import json
import socket
import stat
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from atoll import ids
from atoll.drivers.docker.driver import DockerDriver
from atoll.drivers.docker.node_identity import NAME_FILE
from atoll.errors import PermanentError
from atoll.link.errors import LinkLost
from atoll.model.instance import Callback, Handle, State
from atoll.settings import LocalSettings
from tests.contract.drivers.conftest import (
    LIMITS,
    Node,
    RunOutput,
    job,
    on,
    printed,
    spec,
    started,
    template,
)
from tests.runs import run_over
from tests.servers.images import PYTHON

if TYPE_CHECKING:
    from tests.servers.docker import Dockerd

pytestmark = [pytest.mark.anyio, on("docker")]

LOCAL = LocalSettings()

TRY = """
import errno, os, sys
def tried(what, *arguments):
    try:
        what(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
    return 'done'
"""


def build(engine: Dockerd, reference: str, *lines: str, **files: str) -> str:
    """Build an image whose Dockerfile runs no commands; `files` are programs that it copies."""
    context = io.BytesIO()
    dockerfile = "\n".join(lines)
    with tarfile.open(fileobj=context, mode="w") as packed:
        for name, text in {"Dockerfile": dockerfile, **files}.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o755
            packed.addfile(entry, io.BytesIO(text.encode()))
    about = {"t": reference}
    output = engine.ask("POST", "/build", params=about, content=context.getvalue()).text
    assert "Successfully tagged" in output, output
    return reference


def told(node: Node, handle: Handle) -> dict[str, Any]:
    return node.engine.inspect(str(handle.data["container"]))


# Seen by the engine


async def test_containers_are_created_with_all_confinement_options(node: Node) -> None:
    handle = await node.driver.ensure(spec())
    about = told(node, handle)
    config, host = about["Config"], about["HostConfig"]
    uid = int(handle.data["uid"])
    assert uid in range(LOCAL.uid_base, LOCAL.uid_base + LOCAL.uid_count)
    assert config["User"] == f"{uid}:{uid}"
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert not host["Privileged"]
    assert host["ReadonlyRootfs"]
    assert (host["NetworkMode"], host["PidMode"], host["UTSMode"]) == ("none", "", "")
    assert (host["IpcMode"], host["CgroupnsMode"]) == ("private", "private")
    assert host["Memory"] == host["MemorySwap"] == LIMITS.memory
    assert host["NanoCpus"] == LIMITS.cpu * 1e9
    assert LIMITS.max_processes < host["PidsLimit"] < LIMITS.max_processes + 16
    assert {limit["Name"]: limit["Hard"] for limit in host["Ulimits"]} == {
        "core": 0, "memlock": 65_536, "msgqueue": 819_200, "nofile": 1024, "sigpending": 4096,
    }  # fmt: skip
    assert host["LogConfig"]["Config"] == {"max-size": "64k", "max-file": "1"}
    assert not host["Devices"]
    assert host["RestartPolicy"]["Name"] == "no"
    writable = {mount["Destination"] for mount in about["Mounts"] if mount["RW"]}
    assert writable == {"/workspace", "/run/atoll/link", "/run/atoll/journal"}


async def test_docker_inspect_shows_no_secret(node: Node) -> None:
    driver = node.driver
    assert isinstance(driver, DockerDriver)
    callback = Callback("http://callback.test/path", "the-callback-token")
    handle = await driver.ensure(spec(callback=callback))
    token = driver._identity.token(handle.instance_id)
    process = Path(f"/proc/{node.pid_1(handle)}")
    seen = [
        json.dumps(told(node, handle)),
        json.dumps(node.engine.containers()),
        node.engine.logs(str(handle.data["container"])),
        (process / "cmdline").read_text(),
        (process / "environ").read_text(),
        str(handle),
    ]
    for text in seen:
        assert token not in text
        assert callback.token not in text
        assert callback.url not in text


# Seen by code inside


async def test_code_has_no_privileges(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    code = """
import os
words = dict(line.split(':', 1) for line in open('/proc/self/status'))
for name in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb'):
    assert int(words[name], 16) == 0, name
print(words['NoNewPrivs'].strip(), words['Seccomp'].strip(), words['Uid'].split(), os.getgroups())
interfaces = [line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]]
print(interfaces, os.uname().nodename)
"""
    uid = handle.data["uid"]
    assert await printed(node.driver, link, code) == (
        f"1 2 {[str(uid)] * 4} [{uid}]\n['lo'] sandbox"
    )
    link.close()


async def test_only_the_workspace_and_temporary_directories_are_writable(node: Node) -> None:
    _, link = await started(node.driver, spec())
    code = f"""{TRY}
found = set()
for place, directories, _ in os.walk('/'):
    # Not files of a file system: the kernel generates them.
    closed = ('/proc', '/sys')
    directories[:] = [name for name in directories if place + name not in closed]
    name = os.path.join(place, 'new')
    if tried(lambda: os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))) == 'done':
        os.unlink(name)
        found.add(place if '/workspace' not in place else '/workspace')
print(sorted(found))
print(*(tried(open, path, 'w') for path in ('/etc/passwd', '/etc/mark', '/proc/sys/vm/swappiness')))
print(tried(os.chmod, '/etc/mark', 0o777), tried(os.mknod, '/tmp/disk', 0o60600, os.makedev(8, 0)))
"""
    output = (await printed(node.driver, link, code)).splitlines()
    assert output[0] == "['/dev/mqueue', '/dev/shm', '/tmp', '/var/tmp', '/workspace']"
    assert "done" not in " ".join(output[1:])
    link.close()


async def test_temporary_directories_are_limited_and_executable(node: Node) -> None:
    _, link = await started(node.driver, spec())
    code = f"""{TRY}
def fill(path):
    with open(path, 'wb', 0) as file:
        while True:
            file.write(bytes(1 << 20))
for place in ('/tmp', '/var/tmp', '/dev/shm'):
    about = os.statvfs(place)
    print(about.f_blocks * about.f_frsize >> 20, tried(fill, place + '/fill'))
    os.unlink(place + '/fill')
"""
    # The size of a file is limited, too.
    wanted = job(node.driver, code) | {"limits": {}}
    output = RunOutput()
    result = await run_over(link, wanted, output)
    assert result["exit_code"] == 0, output.pieces
    assert output.stdout.decode().splitlines() == ["64 ENOSPC"] * 3
    run = "import subprocess\nopen('/tmp/x', 'w').write('#!/bin/sh\\necho ran')\n"
    run += "import os; os.chmod('/tmp/x', 0o755); print(subprocess.check_output('/tmp/x'))"
    assert await printed(node.driver, link, run) == "b'ran\\n'"
    link.close()


async def test_code_cannot_signal_or_inspect_the_supervisor(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    code = f"""{TRY}
import ctypes, signal
for number in set(range(1, 65)) - {{32, 33}}:
    tried(os.kill, 1, number)
names = ['environ', 'mem', 'maps', 'auxv', 'stack']
print(*(tried(lambda: open('/proc/1/' + name, 'rb').read(1)) for name in names))
print(tried(os.listdir, '/proc/1/fd'), tried(os.listdir, '/proc/1/root'),
      tried(os.readlink, '/proc/1/exe'), tried(os.readlink, '/proc/1/cwd'))
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(16, 1, None, None), errno.errorcode[ctypes.get_errno()])
print(tried(os.open, '/proc/1/oom_score_adj', os.O_WRONLY))
descriptor = os.pidfd_open(1)
print(libc.syscall(438, descriptor, 0, 0), errno.errorcode[ctypes.get_errno()])
buffer = ctypes.create_string_buffer(8)
class Part(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]
here, there = Part(ctypes.addressof(buffer), 8), Part(0x400000, 8)
print(libc.process_vm_readv(1, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))
"""
    output = await printed(node.driver, link, code)
    for word in ("done", " 0", "\n0", "8"):
        assert word not in output, output
    assert (await node.driver.observe(handle)).state is State.RUNNING
    assert await printed(node.driver, link, "print(1)") == "1"
    link.close()


async def test_code_cannot_open_the_socket_or_the_journal(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    code = f"""{TRY}
import socket
for place in ('/run/atoll/link', '/run/atoll/journal'):
    print(tried(os.listdir, place), tried(os.chmod, place, 0o777), tried(os.rmdir, place),
          tried(os.rename, place, place + '2'), tried(os.open, place + '/x', 0o101),
          tried(os.chdir, place), tried(os.symlink, '/tmp', place + '/link'))
for name in ('link/link.sock', 'journal/0', 'journal/1'):
    path = '/run/atoll/' + name
    print(tried(os.stat, path), tried(os.unlink, path), tried(os.open, path, os.O_RDWR),
          tried(os.rename, path, '/workspace/x'), tried(os.link, path, '/workspace/x'))
print(tried(socket.socket(socket.AF_UNIX).connect, '/run/atoll/link/link.sock'))
print(tried(socket.socket(socket.AF_UNIX).bind, '/run/atoll/link/other.sock'))
print(tried(open, '/run/atoll/executor.pyz', 'wb'), tried(os.mkdir, '/run/atoll/x'))
"""
    for _ in range(2):
        output = await printed(node.driver, link, code)
        assert "done" not in output, output
        link.close()
        # It is closed to the next instance, too.
        driver = await node.take_over()
        link = await driver.connect(handle)
    link.close()


async def test_code_cannot_open_the_journal_of_the_previous_instance(node: Node) -> None:
    first, link = await started(node.driver, spec())
    await printed(node.driver, link, "print('for the journal')")
    link.close()
    await node.driver.destroy(first)
    again = spec(workspace=node.driver.workspaces.of(first))
    _, link = await started(node.driver, again)
    code = f"{TRY}\nprint(tried(os.listdir, '/run/atoll/journal'))"
    assert await printed(node.driver, link, code) == "EACCES"
    link.close()


async def test_the_number_of_processes_is_limited(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    code = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        count += 1
except OSError as error:
    print(count, error.errno)
"""
    count, number = (await printed(node.driver, link, code)).split()
    assert number == "11"  # EAGAIN
    # The forking process counts, and perhaps a spare process of the zygote.
    assert LIMITS.max_processes - 2 <= int(count) <= LIMITS.max_processes - 1
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = await run_over(link, job(node.driver, bomb, timeout=1.0), RunOutput())
    assert result["exit_code"] != 0
    # In addition to the supervisor and the zygote.
    assert len(node.inside(handle)) <= LIMITS.max_processes + 2
    assert await printed(node.driver, link, "print('on')") == "on"
    link.close()


async def test_the_supervisor_survives_user_processes_that_exhaust_memory(node: Node) -> None:
    handle, link = await started(node.driver, spec())
    hogs = """
import os
for _ in range(4):
    if os.fork() == 0:
        open('/proc/self/oom_score_adj', 'w').write('1000')
        break
held = []
while True: held.append(bytearray(1 << 20))
"""
    result = await run_over(link, job(node.driver, hogs), RunOutput())
    assert result["exit_code"] != 0
    assert (await node.driver.observe(handle)).state is State.RUNNING
    assert await printed(node.driver, link, "print('on')") == "on"
    link.close()


# Hostile images


async def test_the_configuration_of_an_image_does_not_weaken_confinement(node: Node) -> None:
    reference = build(
        node.engine,
        "atoll-test/stubborn:1",
        f"FROM {PYTHON}",
        "COPY --chown=1000:1000 mine /data/mine",
        "USER root",
        'ENTRYPOINT ["/bin/sh", "-c", "exec sleep infinity"]',
        'CMD ["nothing"]',
        "VOLUME /data/ /home/somebody /workspace /tmp /var",
        'HEALTHCHECK CMD ["true"]',
        "STOPSIGNAL SIGUSR1",
        "WORKDIR /etc",
        "EXPOSE 80",
        "LABEL atoll.instance=mine atoll.workspace=mine atoll.node=mine atoll.link=mine",
        "LABEL atoll.install=mine atoll.draft=mine atoll.probe=mine atoll.shared=mine",
        "ENV HOME=/root PYTHONPATH=/data ATOLL_PYTHON=/bin/false X=from-image",
        mine="content",
    )
    handle, link = await started(node.driver, spec(template=template(image=reference)))
    about = told(node, handle)
    config = about["Config"]
    uid = handle.data["uid"]
    assert config["User"] == f"{uid}:{uid}"
    assert config["Healthcheck"] == {"Test": ["NONE"]}
    assert "Health" not in about["State"]
    assert config["WorkingDir"] == "/workspace"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Labels"]["atoll.instance"] == handle.instance_id
    assert config["Entrypoint"][0] == "/usr/local/bin/python3"
    assert not config["Cmd"]
    plain, other = await started(node.driver, spec())
    unlike = {
        name
        for name, value in told(node, plain)["HostConfig"].items()
        if value != about["HostConfig"][name]
    }
    assert unlike == {"Mounts", "Tmpfs"}
    code = f"""{TRY}
print(os.getuid(), os.getcwd(), os.environ['HOME'], os.environ['X'], '/data' in sys.path)
print(tried(open, '/etc/new', 'w'), tried(open, '/root/new', 'w'))
for place in ('/data', '/home/somebody', '/var'):
    about = os.statvfs(place)
    print(about.f_blocks * about.f_frsize >> 20, os.listdir(place), os.path.ismount(place))
print(*(tried(open, place + '/new', 'w') for place in ('/workspace', '/tmp', '/var/tmp')))
"""
    assert (await printed(node.driver, link, code)).splitlines() == [
        f"{uid} /workspace /workspace from-image False",
        "EROFS EROFS",
        "64 [] True",
        "64 [] True",
        "64 ['tmp'] True",
        "done done done",
    ]
    other.close()
    link.close()
    for one in (handle, plain):
        await node.driver.destroy(one)
    listed = node.engine.ask("GET", "/volumes").json()["Volumes"] or []
    assert not [volume for volume in listed if not volume["Labels"]]


async def test_a_container_with_inherited_labels_is_not_an_instance(
    node: Node, tmp_path: Path
) -> None:
    """Containers of installations have the node's label and inherit the labels of the image."""
    precious = tmp_path / "precious"
    precious.mkdir()
    name = (node.data_dir / "node" / NAME_FILE).read_text()
    for number, instance in enumerate((str(precious), "../../x", ids.instance_id())):
        labels = {"atoll.node": name, "atoll.instance": instance, "atoll.workspace": "/home"}
        about = {"Image": PYTHON, "Cmd": ["true"], "Labels": labels}
        where = {"name": f"atoll-install_{number}"}
        made = node.engine.ask("POST", "/containers/create", params=where, json=about).json()["Id"]
        try:
            assert await node.driver.handles() == []
            with pytest.raises(ValueError, match="is not an instance id"):
                await node.driver.destroy(Handle("../x", "docker", 1, {"container": made}))
        finally:
            node.engine.remove(made)
    assert precious.is_dir()


async def test_an_image_with_a_very_large_configuration_is_refused(node: Node) -> None:
    """An engine repeats the labels of an image in every list of containers."""
    made = node.engine.create(PYTHON)
    try:
        about = {"container": made, "repo": "atoll-test/wordy", "tag": "1"}
        labels = {"Labels": {"words": "x" * 300_000}}
        node.engine.ask("POST", "/commit", params=about, json=labels)
    finally:
        node.engine.remove(made)
    wanted = spec(template=template(image="atoll-test/wordy:1"))
    with pytest.raises(PermanentError) as refused:
        await node.driver.ensure(wanted)
    assert refused.value.code == "image_refused"
    assert await node.driver.handles() == []


async def test_code_that_ran_before_the_seal_cannot_keep_files_open_or_redirect_them(
    node: Node, tmp_path: Path
) -> None:
    handle, link = await started(node.driver, spec())
    link.close()
    directory = node.data_dir / "node" / "instances" / handle.instance_id / "link"
    directory.chmod(0o777)
    (await node.driver.connect(handle)).close()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other"))
        other.listen()
        other.setblocking(False)
        (directory / "link.sock").rename(directory / "kept")
        (directory / "link.sock").symlink_to(tmp_path / "other")
        with pytest.raises(LinkLost, match="is not a socket"):
            await node.driver.connect(handle)
        with pytest.raises(BlockingIOError):
            other.accept()
