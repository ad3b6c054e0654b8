"""The Docker engine that other tests use: it works and leaves nothing behind."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace

import httpx
import pytest

from tests.e2e.api import eventually
from tests.servers import reaper
from tests.servers.docker import Dockerd
from tests.servers.images import PYTHON, SHELL, Archives


def remains(engine: Dockerd | SimpleNamespace) -> list[str]:
    """Processes, mounts, control groups and files that remain."""
    place = str(engine.place)
    found = [f"mount {point}" for point in reaper.mounts(engine.place)]
    found += [f"group {group}" for group in reaper.cgroups(engine.cgroup)]
    found += [place] if engine.place.exists() else []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                description = (process / "cmdline").read_text(), (process / "cgroup").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if place in description[0] or f"/{engine.cgroup}/" in description[1]:
                found.append(f"process {process.name} {description[0]}")
    return found


@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_containers_of_both_images_run_without_a_network(
    dockerd: Dockerd, runtime: str, request: pytest.FixtureRequest
) -> None:
    if runtime == "runsc":
        request.getfixturevalue("runsc")
    code = "import ctypes, json, socket, sqlite3, ssl; print(socket.if_nameindex())"
    ran = dockerd.run(PYTHON, "python3", "-c", code, runtime=runtime)
    assert ran == (0, "[(1, 'lo')]\n")
    ran = dockerd.run(SHELL, "sh", "-c", "id -u; cat /etc/mark; exit 3", runtime=runtime)
    assert ran == (3, "0\nfrom the image")
    with pytest.raises(httpx.HTTPStatusError, match="python3"):
        dockerd.run(SHELL, "python3", runtime=runtime)


def test_two_engines_are_independent(
    dockerd: Dockerd, own_dockerd: Dockerd, tmp_path: Path
) -> None:
    ids = {engine.ask("GET", "/info").json()["ID"] for engine in (dockerd, own_dockerd)}
    assert len(ids) == 2
    container = dockerd.begin(SHELL, "sleep", "infinity")
    assert own_dockerd.containers() == []
    own_dockerd.kill()
    assert not own_dockerd.answers()
    assert dockerd.inspect(container)["State"]["Running"]
    dockerd.remove(container)


def test_an_engine_over_tcp_requires_a_client_certificate(tmp_path: Path) -> None:
    with Dockerd(tmp_path, tls=True) as engine:
        url = engine.tcp_url.replace("tcp", "https") + "/_ping"
        context = ssl.create_default_context(cafile=str(engine.ca))
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=context, timeout=60)
        context.load_cert_chain(engine.cert, engine.key)
        assert httpx.get(url, verify=context, timeout=60).text == "OK"


def test_containers_survive_a_crash_of_the_engine(own_dockerd: Dockerd) -> None:
    container = own_dockerd.begin(SHELL, "sleep", "infinity")
    own_dockerd.crash()
    # The process has another name until it has executed the program.
    eventually(lambda: any("sleep" in each for each in remains(own_dockerd)))
    own_dockerd.start()
    assert own_dockerd.inspect(container)["State"]["Status"] == "exited"


def test_containers_and_images_survive_a_restart_of_the_engine(own_dockerd: Dockerd) -> None:
    # With a handler: the first process of a container ignores SIGTERM otherwise.
    container = own_dockerd.begin(SHELL, "sh", "-c", "trap exit TERM; sleep infinity & wait")
    own_dockerd.restart()
    assert own_dockerd.inspect(container)["State"]["Status"] == "exited"
    assert own_dockerd.run(SHELL, "true").exit_code == 0


@pytest.mark.parametrize("end", ["stop", "kill", "crash", "nothing"])
def test_an_engine_leaves_nothing_behind(
    image_archives: Archives, tmp_path: Path, end: str
) -> None:
    with Dockerd(tmp_path) as engine:
        image_archives.load(engine)
        paused = engine.begin(SHELL, "sh", "-c", "trap exit TERM; sleep infinity & wait")
        engine.ask("POST", f"/containers/{paused}/pause")
        engine.begin(SHELL, "sh", "-c", "trap exit TERM; sleep infinity & wait")
        runtimes = engine.ask("GET", "/info").json()["Runtimes"]
        if "runsc" in runtimes:
            engine.begin(SHELL, "sleep", "infinity", runtime="runsc")
        assert len(remains(engine)) > 3
        if end != "nothing":
            getattr(engine, end)()
    assert remains(engine) == []


KILLED = """
import sys
from pathlib import Path
from tests.servers.docker import Dockerd
from tests.servers.images import SHELL, make_archives
with Dockerd(Path(sys.argv[1])) as engine:
    make_archives(Path(sys.argv[2])).load(engine)
    engine.begin(SHELL, "sleep", "infinity")
    print(engine.place, engine.cgroup, flush=True)
    sys.stdin.read()
"""


def test_an_engine_leaves_nothing_behind_when_the_tests_are_killed(
    image_archives: Archives, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), str(image_archives.shell.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as tests:
        assert tests.stdout is not None
        place, cgroup = tests.stdout.readline().split()
        tests.kill()
    engine = SimpleNamespace(place=Path(place), cgroup=cgroup)
    deadline = monotonic() + 60
    while left := remains(engine):
        assert monotonic() < deadline, left
        sleep(0.05)
