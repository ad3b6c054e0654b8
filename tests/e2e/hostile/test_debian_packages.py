"""What a Debian package's own script can do while it is installed: nothing to the host."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from atoll.drivers.local import debian_layers, sandbox
from atoll.drivers.local.debian_layers import Layers
from atoll.drivers.local.sandbox_host import SandboxHost
from atoll.drivers.shared import cgroups, seccomp
from atoll.errors import AtollError, PermanentError, TemporaryError
from atoll.model.template import Layer
from atoll.settings import LocalSettings, PackageSettings
from tests.servers import debian

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        os.geteuid() != 0 or debian.missing() is not None, reason="needs root, apt and dpkg"
    ),
]

BUILD_UID = 1_777_000_000
NAME = "a" * 40
MiB = 2**20
CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return debian.make_base(tmp_path_factory.mktemp("roots") / "base")


class Site:
    """A node with one package on its mirror, which is to be installed."""

    def __init__(self, place: Path, base: Path, **options: object) -> None:
        (place / "mirror").mkdir()
        self.place = place
        self.base = base
        self.repository = debian.Repository(place / "mirror")
        self.local = LocalSettings(build_uid=BUILD_UID)
        settings = {
            "debian_mirror": self.repository.url,
            "debian_suite": "./",
            "debian_unsigned": True,
            "disk": 64 * MiB,
            **options,
        }
        self.layers = Layers(place / "layers", self.local, PackageSettings.model_validate(settings))
        program = seccomp.program()
        assert program is not None
        (place / "filter").write_bytes(program)
        there = [path for path in sandbox.HIDDEN if os.path.exists(path)]
        hidden = tuple(f"{path}/" if os.path.isdir(path) else path for path in there)
        self.groups = cgroups.node_groups(self.local, place)
        host = SandboxHost("/usr/bin/bwrap", self.groups, hidden, place / "filter", "", True)
        self.layers.open(host, None)
        self.output = bytearray()

    async def install(self, script: str, *, seconds: float = 60.0) -> str:
        """Install a package with this script; what the script printed."""
        self.repository.add("evil", postinst=f"{script}\necho said all")
        await self.layers.build(
            str(self.base),
            (),
            Layer(NAME, ("evil",)),
            timeout=timedelta(seconds=seconds),
            on_output=self.output.extend,
        )
        return self.output.decode()

    @property
    def layer(self) -> Path:
        return self.place / "layers" / NAME


@pytest.fixture
def site(bubblewrap: str, tmp_path: Path, base: Path) -> Iterator[Site]:
    made = Site(tmp_path, base)
    yield made
    assert not [name for name in os.listdir(tmp_path / "layers") if name.startswith(".")]
    assert made.groups.names() == []
    assert running() == []
    made.groups.close()


def running() -> list[str]:
    """Processes of builds, by what they are called."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
            except OSError:
                continue
            uid = int(status.partition("Uid:")[2].split()[0])
            if BUILD_UID <= uid < BUILD_UID + 65_536 and "\nState:\tZ" not in status:
                found.append(status.split()[1])
    return found


async def test_uid_0_of_a_build_is_unprivileged_on_the_host(site: Site) -> None:
    output = await site.install(
        "id -u; cat /proc/self/uid_map; touch /mine; head -60 /proc/self/status"
    )

    assert f"{BUILD_UID}      65536" in output
    assert "NoNewPrivs:\t1" in output
    assert "Seccomp:\t2" in output
    assert (site.layer / "mine").stat().st_uid == BUILD_UID


@pytest.mark.quick
async def test_a_build_sees_no_file_of_the_host(site: Site, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    secret.chmod(0o666)

    output = await site.install(
        f"cat {secret} /proc/1/root{secret} /proc/$$/root{secret} 2>/dev/null; ls / /tmp /run; "
        "cat /proc/kcore | head -c 4; cat /proc/mounts 2>&1"
    )

    assert "of the host" not in output
    assert f" {tmp_path}" not in output.partition("said all")[0].rpartition("Setting up")[2]


async def test_a_build_writes_to_its_layer_only(site: Site, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    victim.chmod(0o666)
    before = (site.base / "etc/passwd").read_text()

    await site.install(
        "echo changed > /etc/passwd; rm -f /usr/bin/touch; "
        f"mkdir -p {tmp_path}; echo changed > {victim}; ln -s {victim} /link; echo x > /link; "
        "ln -sfn / /opt; echo changed > /proc/sys/kernel/core_pattern; "
        "echo 1 > /proc/sysrq-trigger; echo -17 > /proc/1/oom_score_adj; true"
    )

    assert victim.read_text() == "as it was"
    assert (site.base / "etc/passwd").read_text() == before
    assert (site.base / "usr/bin/touch").exists()
    assert "changed" not in await asyncio.to_thread(CORE_PATTERN.read_text)
    assert (site.layer / "etc/passwd").read_text() == "changed\n"


async def test_a_build_creates_no_device_and_mounts_nothing(site: Site) -> None:
    output = await site.install(
        "mknod /disk b 8 0 && echo HAS A DISK; mknod /mem c 1 1 && echo HAS MEMORY; "
        "mount -t tmpfs none /mnt && echo MOUNTED; mount --bind / /mnt && echo MOUNTED; "
        "python3 -c 'import os; os.chroot(\"/\")' && echo CHANGED ROOT; "
        "python3 -c 'import os; os.unshare(0x10000000)' && echo UNSHARED; true"
    )

    for words in ("HAS A DISK", "HAS MEMORY", "MOUNTED", "CHANGED ROOT", "UNSHARED"):
        assert f"\n{words}" not in output


ASK = """python3 - <<'END'
import http.client, socket
for port in ({port},):
    try:
        socket.create_connection(("127.0.0.1", port), 2)
        print("REACHED THE HOST")
    except OSError as error:
        print("refused", error)
for family, address in ((socket.AF_INET, ("192.0.2.1", 80)), (socket.AF_UNIX, "\\0{name}")):
    try:
        socket.socket(family).connect(address)
        print("REACHED THE HOST")
    except OSError as error:
        print("refused", error)
for path in ("/0/../secret", "/0/%2e%2e/secret", "/0//etc/passwd", "/1/x", "/0/link", "http://h/"):
    asked = http.client.HTTPConnection("127.0.0.1", 3142)
    asked.request("GET", path)
    answer = asked.getresponse()
    print(path, answer.status, answer.read())
asked = http.client.HTTPConnection("127.0.0.1", 3142)
asked.request("POST", "/0/Packages", b"x")
print("POST", asked.getresponse().status)
END"""


async def test_a_build_reaches_nothing_but_the_mirror(site: Site, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("beside the mirror")
    (tmp_path / "mirror" / "link").symlink_to("/etc/passwd")
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as listener,
        closing(socket.socket(socket.AF_UNIX)) as abstract,
    ):
        abstract.bind(f"\0{tmp_path}")
        abstract.listen()
        script = ASK.replace("{port}", str(listener.getsockname()[1]))
        output = await site.install(script.replace("{name}", str(tmp_path)))

    assert "REACHED" not in output
    assert "beside the mirror" not in output
    assert "root:" not in output
    assert "/0/../secret 403" in output
    assert "/1/x 403" in output
    assert "/0/link 404" in output
    assert "POST 403" in output


async def test_processes_end_with_their_build(site: Site) -> None:
    await site.install("(setsid sleep 1000 &) ; sleep 1000 & echo left")

    assert running() == []


async def test_a_build_cannot_fill_the_disk(site: Site) -> None:
    script = "head -c 200000000 /dev/zero > /large || { echo TOO LARGE; exit 1; }"
    with pytest.raises(PermanentError) as caught:
        await site.install(script)

    assert caught.value.code == "build_failed"
    assert "TOO LARGE" in site.output.decode()
    assert not site.layer.exists()


async def test_a_build_ends_at_its_timeout(site: Site) -> None:
    with pytest.raises(PermanentError, match="not installed within 4 s"):
        await site.install("sleep 1000", seconds=4)

    assert not site.layer.exists()


async def test_the_number_of_processes_of_a_build_is_limited(
    bubblewrap: str, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debian_layers, "INSTALL_PROCESSES", 32)
    site = Site(tmp_path, base)
    if "cgroup_pids" not in site.groups.provides:
        pytest.skip("no control group for processes")

    # Including processes of apt and dpkg; refused forks only concern this script.
    with pytest.raises(AtollError):
        await site.install("i=0; while [ $i -lt 64 ]; do sleep 1000 & i=$((i+1)); done; exit 0")

    assert running() == []
    site.groups.close()


async def test_a_cancelled_build_leaves_nothing(site: Site) -> None:
    began = asyncio.Event()

    def say(data: bytes) -> None:
        site.output.extend(data)
        if b"Setting up" in site.output:
            began.set()

    site.output = bytearray()
    site.repository.add("slow", postinst="sleep 1000")
    building = asyncio.create_task(
        site.layers.build(
            str(site.base),
            (),
            Layer(NAME, ("slow",)),
            timeout=timedelta(seconds=60),
            on_output=say,
        )
    )
    async with asyncio.timeout(30):
        await began.wait()
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building

    assert not site.layer.exists()


async def test_an_unreachable_mirror_is_a_transient_error(
    bubblewrap: str, tmp_path: Path, base: Path
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
        answering = threading.Thread(target=_refuse, args=(silent,), daemon=True)
        answering.start()
        site = Site(tmp_path, base, debian_mirror=f"http://127.0.0.1:{port}/debian")
        with pytest.raises(TemporaryError, match="mirror could not be reached"):
            await site.install("true")
    site.groups.close()


def _refuse(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.close()
