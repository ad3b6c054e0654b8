"""Python packages on a Docker node, including packages and images of attackers."""

from __future__ import annotations

import base64
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem, session
from tests.harness import Server
from tests.servers.images import PYTHON, SHELL
from tests.servers.index import Index

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.docker import Dockerd

MiB = 1024 * 1024
LABEL = "atoll.install"
CODE = "import greet, lower; print(greet.version, lower.version)"


@pytest.fixture(scope="module")
def index() -> Iterator[Index]:
    with Index(password="index-password") as running:
        running.add("greet", "1.2", requires=["lower>=1"], scripts={"hello-greet": "greet:main"})
        running.add("lower", "2.0")
        running.add("needs-nothing-there", requires=["not-on-the-index"])
        yield running


def settings(engine: Dockerd, index: Index) -> dict[str, str]:
    return {
        "ATOLL_DRIVER": "docker",
        "ATOLL_DOCKER__URL": engine.url,
        "ATOLL_DOCKER__IMAGE": PYTHON,
        "ATOLL_POOL__SIZE": "0",
        "ATOLL_PACKAGES__INDEX_URL": index.url,
        "ATOLL_PACKAGES__ALLOW_SOURCE_BUILDS": "1",
        "ATOLL_PACKAGES__DISK": str(64 * MiB),
        "ATOLL_PACKAGES__MEMORY": str(512 * MiB),
    }


@pytest.fixture(scope="module")
def server(
    dockerd: Dockerd, index: Index, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server"), **settings(dockerd, index)) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[Api]:
    with server.client() as http:
        http.timeout = 120
        yield Api(http)


def installs(server: Server, engine: Dockerd) -> list[object]:
    """Containers and directories of installations, running or left behind."""
    places = (server.data_dir / "node" / "installs").iterdir()
    return [*places, *engine.containers(label=[LABEL])]


def provides(api: Api) -> list[str]:
    [node] = answer(api.http.get(f"{V1}/nodes"))["items"]
    return list(node["provides"])


def log_of(api: Api, session_id: str) -> str:
    return api.http.get(f"{V1}/sessions/{session_id}/dependencies/log").text


def refused(api: Api, name: str) -> tuple[str, str]:
    """The error of an installation that fails, and its log."""
    body = {"dependencies": [{"name": name}]}
    failed = problem(api.http.post(f"{V1}/sessions", json=body), 422, "dependency_failed")
    return failed["detail"], log_of(api, failed["session_id"])


def test_a_session_has_its_packages_and_their_dependencies(
    api: Api, server: Server, dockerd: Dockerd, index: Index
) -> None:
    with session(api, dependencies=[{"name": "greet", "version": ">=1.1"}]) as made:
        assert api.get(made)["dependencies"]["installed"] == ["greet==1.2", "lower==2.0"]
        assert api.run(made, CODE)["stdout"] == "1.2 2.0\n"
        assert api.run(made, command=["python3", "-c", CODE])["stdout"] == "1.2 2.0\n"
        assert api.run(made, command=["hello-greet"])["stdout"] == "greet 1.2\n"
        log = log_of(api, made)
        assert "Installed: greet==1.2 lower==2.0" in log
        assert "index-password" not in log
    assert installs(server, dockerd) == []
    asked = len(index.asked)
    with session(api, dependencies=[{"name": "greet", "version": ">=1.1"}]) as made:
        assert api.run(made, CODE)["stdout"] == "1.2 2.0\n"
    assert len(index.asked) == asked


def test_packages_can_be_added_to_a_running_session(api: Api) -> None:
    with session(api) as made:
        body = {"dependencies": [{"name": "lower"}]}
        response = answer(api.http.post(f"{V1}/sessions/{made}/dependencies", json=body))
        assert response["installed"] == ["lower==2.0"]
        assert api.run(made, "import lower; print(lower.version)")["stdout"] == "2.0\n"


def test_packages_can_be_installed_for_an_image_without_python(api: Api) -> None:
    body = {"id": "lent", "name": "lent", "image": SHELL}
    answer(api.http.post(f"{V1}/templates", json=body), 201)
    with session(api, template_id="lent", dependencies=[{"name": "greet"}]) as made:
        assert api.run(made, CODE)["stdout"] == "1.2 2.0\n"
        assert api.run(made, command=["hello-greet"])["stdout"] == "greet 1.2\n"


def test_a_template_can_have_packages(api: Api) -> None:
    body = {"id": "own", "name": "own", "image": PYTHON, "python_packages": ["greet"]}
    made = api.http.post(f"{V1}/templates", json=body)
    assert made.status_code in (201, 202), made.text

    def status() -> str:
        return str(answer(api.http.get(f"{V1}/templates/own"))["status"])

    eventually(lambda: status() in ("ready", "failed"), 60)
    assert status() == "ready", answer(api.http.get(f"{V1}/templates/own"))
    with session(api, template_id="own") as made_session:
        assert api.run(made_session, CODE)["stdout"] == "1.2 2.0\n"


def test_a_package_missing_from_the_index_fails_and_leaves_nothing(
    api: Api, server: Server, dockerd: Dockerd
) -> None:
    why, log = refused(api, "needs-nothing-there")
    assert "not-on-the-index" in why
    assert "not-on-the-index" in log
    assert installs(server, dockerd) == []


def test_a_control_plane_ends_its_installations_when_it_stops(
    dockerd: Dockerd, index: Index, tmp_path: Path
) -> None:
    index.add("slow", "1.0")
    held = index.hold("/files/slow-1.0-py3-none-any.whl")
    env = {**settings(dockerd, index), "ATOLL_SHUTDOWN_TIMEOUT": "1"}
    with Server(tmp_path, **env) as server:
        with server.client() as http:
            body = {"dependencies": [{"name": "slow"}]}
            answer(http.post(f"{V1}/sessions?wait=0", json=body), 201)
            assert held.asked.wait(60)
        # A container, its directory and its downloads.
        assert len(installs(server, dockerd)) == 3
        server.stop()
        assert installs(server, dockerd) == []
        held.go.set()


def test_an_installation_of_a_killed_control_plane_ends_and_is_repeated(
    own_dockerd: Dockerd, tmp_path: Path
) -> None:
    with Index() as index:
        index.add("greet", "1.0")
        held = index.hold("/files/greet-1.0-py3-none-any.whl")
        directory = tmp_path / "server"
        directory.mkdir()
        with Server(directory, **settings(own_dockerd, index)) as server:
            with server.client() as http:
                body = {"dependencies": [{"name": "greet"}], "timeout": 600}
                made = answer(http.post(f"{V1}/sessions?wait=0", json=body), 201)["id"]
                assert held.asked.wait(60)
            assert len(own_dockerd.containers(label=[LABEL])) == 1
            server.stop(signal.SIGKILL)
            # It ends although no control plane runs.
            eventually(lambda: own_dockerd.containers(label=[LABEL]) == [], 60)
            held.go.set()
            with server.start().client() as http:
                api = Api(http)
                assert api.run(made, "import greet; print(greet.version)")["stdout"] == "1.0\n"
                api.end(made)
            assert installs(server, own_dockerd) == []


EVIL = """
_dumps = dumps
def dumps(found, *arguments, **about):
    if isinstance(found, dict) and "installed" in found:
        with open("/build/target/lower.py", "w") as file:
            file.write("version = 'POISON'")
    return _dumps(found, *arguments, **about)
"""
"""Added to the module `json` of an image, which reports the interpreter of the victim's image."""


def test_a_malicious_image_cannot_poison_packages_of_other_images(api: Api) -> None:
    evil = base64.b64encode(EVIL.encode()).decode()
    code = f"import base64, json; open(json.__file__, 'ab').write(base64.b64decode('{evil}'))"
    dockerfile = f'FROM {PYTHON}\nRUN ["python3", "-c", "{code}"]\n'
    body = {"id": "fakes", "name": "fakes", "dockerfile": dockerfile}
    made = api.http.post(f"{V1}/templates", json=body)
    assert made.status_code in (201, 202), made.text
    get = f"{V1}/templates/fakes"
    eventually(lambda: answer(api.http.get(get))["status"] in ("ready", "failed"), 60)
    assert answer(api.http.get(get))["status"] == "ready", answer(api.http.get(get))

    wanted = [{"name": "lower", "version": "==2.0"}]
    ask = {"template_id": "fakes", "dependencies": wanted}
    failed = problem(api.http.post(f"{V1}/sessions", json=ask), 422, "dependency_failed")
    assert "differs from the file in its wheel" in failed["detail"]
    with session(api, dependencies=wanted) as victim:
        assert api.run(victim, "import lower; print(lower.version)")["stdout"] == "2.0\n"


# Source builds


NOSY = """
import socket
for address in {addresses}:
    try:
        socket.create_connection(address, 2)
        print("REACHED", address, flush=True)
    except OSError:
        print("no way to", address, flush=True)
for path in {paths}:
    print("SEEN" if os.path.exists(path) else "not there", path, flush=True)
print("variables", sorted(os.environ), flush=True)
for place in ("/usr/x", "/etc/x", "/x", "/run/atoll/uv", "/run/atoll/install.py"):
    try:
        open(place, "ab").close()
        print("WROTE", place, flush=True)
    except OSError:
        print("read-only", place, flush=True)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("rights", os.getuid(), status["CapEff"].strip(), status["NoNewPrivs"].strip(),
      status["Seccomp"].strip(), flush=True)
raise SystemExit("enough")
"""


def test_a_source_build_has_no_network_no_host_files_and_no_privileges(
    api: Api, server: Server, dockerd: Dockerd, index: Index, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports = (listener.getsockname()[1], index.port)
        addresses = [*(("127.0.0.1", port) for port in ports), ("192.0.2.1", 80)]
        paths = [str(secret), str(server.data_dir / "key"), str(dockerd.socket), "/root/.ssh"]
        index.add_source("nosy", code=NOSY.format(addresses=addresses, paths=paths))
        _, log = refused(api, "nosy")
    assert log.count("no way to") >= 3, log
    assert log.count("not there") >= 4
    assert "rights 1000 0000000000000000 1 2" in log
    for bad in ("REACHED", "SEEN", "WROTE", "index-password", "ATOLL_"):
        assert bad not in log, log
    assert installs(server, dockerd) == []


ASKS = """
import socket
rows = [line.split() for line in open("/proc/net/tcp")][1:]
ports = {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"}
def ask(line):
    with socket.create_connection(("127.0.0.1", *ports)) as way:
        way.sendall((line + " HTTP/1.1\\nHost: x\\nConnection: close\\n\\n").encode())
        answer = b""
        while data := way.recv(65536):
            answer += data
    print(line, "->", answer.split(b"\\r\\n")[0], flush=True)
for line in (
    "GET http://127.0.0.1:PORT/simple/elsewhere/", "GET /", "GET /simple/../files/x",
    "GET //127.0.0.1:PORT/simple/", "CONNECT 127.0.0.1:PORT", "POST /simple/lower/",
    "GET /simple/lower/",
):
    ask(line)
for _ in range(300):
    socket.create_connection(("127.0.0.1", *ports)).close()
ask("GET /simple/lower/")
raise SystemExit("enough")
"""


def test_a_source_build_reaches_only_the_index(api: Api, index: Index) -> None:
    with Index() as outside:
        outside.add("elsewhere")
        index.add_source("asks", code=ASKS.replace("PORT", str(outside.port)))
        _, log = refused(api, "asks")
        assert outside.asked == []
    lines = [line.strip() for line in log.splitlines() if "->" in line]
    assert len({line for line in lines if "403" in line}) == 6, log
    fine = "GET /simple/lower/ -> b'HTTP/1.1 200 '"
    assert [line for line in lines if "403" not in line][:2] == [fine, fine], log


def test_a_successful_source_build_leaves_no_processes(
    api: Api, server: Server, dockerd: Dockerd, index: Index
) -> None:
    stays = "if os.fork() == 0:\n    os.setsid()\n    os.closerange(0, 100)\n    import time\n"
    index.add_source("leaves", code=stays + "    time.sleep(600)")
    with session(api, dependencies=[{"name": "leaves"}]) as made:
        assert api.run(made, "import leaves; print(leaves.version)")["stdout"] == "1.0\n"
    assert installs(server, dockerd) == []


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("fills-disk", "with open('/build/x', 'wb') as f:\n    while True: f.write(bytes(1<<20))"),
        ("fills-unnamed", "kept = []\nfor i in range(40):\n"
         "    kept.append(open('/build/tmp/u%d' % i, 'wb'))\n    os.unlink(kept[-1].name)\n"
         "    kept[-1].write(bytes(8 << 20))\n    kept[-1].flush()"),
        ("fills-memory", "x = [bytearray(1<<20) for _ in range(4096)]"),
        ("never-stops-talking", "for _ in range(2000): print('x' * 65536)\nraise SystemExit(1)"),
        ("talks-in-its-place", "for fd in range(100):\n    try: os.write(os.open("
         "'/proc/1/fd/%d' % fd, os.O_RDWR), b'x' * 100)\n    except OSError: pass\n"
         "raise SystemExit(1)"),
    ],
)  # fmt: skip
def test_a_source_build_that_exhausts_resources_or_forges_answers_fails(
    api: Api, server: Server, dockerd: Dockerd, index: Index, name: str, code: str
) -> None:
    if name == "fills-unnamed" and "disk_quota" not in provides(api):
        pytest.skip("this node has no file systems of their own for installations")
    index.add_source(name, code=code)
    _, log = refused(api, name)
    assert len(log) < 300 * 1024
    assert installs(server, dockerd) == []


def test_packages_are_installed_under_gvisor(
    runsc: str, dockerd: Dockerd, index: Index, tmp_path: Path
) -> None:
    env = {**settings(dockerd, index), "ATOLL_DOCKER__RUNTIME": runsc}
    with Server(tmp_path, **env) as server, server.client() as http:
        http.timeout = 120
        api = Api(http)
        with session(api, dependencies=[{"name": "greet"}]) as made:
            assert api.get(made)["dependencies"]["installed"] == ["greet==1.2", "lower==2.0"]
            assert api.run(made, CODE)["stdout"] == "1.2 2.0\n"
