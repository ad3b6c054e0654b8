"""Packages that attack the installer, and sessions that attack the packages of others."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.hostile.conftest import VARIANTS, attackable
from tests.servers.index import Index, wheel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from tests.e2e.hostile.conftest import Target

MiB = 1024 * 1024


@pytest.fixture(scope="module")
def index() -> Iterator[Index]:
    with Index() as running:
        running.add("plain", "1.0", files={"data/secret.txt": "of the package"})
        yield running


@pytest.fixture(scope="module", params=VARIANTS)
def building(
    request: pytest.FixtureRequest,
    bubblewrap: str,
    index: Index,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Target]:
    """A server that builds packages from source."""
    settings = {
        "ATOLL_PACKAGES__INDEX_URL": index.url,
        "ATOLL_PACKAGES__ALLOW_SOURCE_BUILDS": "1",
        "ATOLL_PACKAGES__DISK": str(64 * MiB),
        "ATOLL_PACKAGES__MEMORY": str(512 * MiB),
    }
    directory = tmp_path_factory.mktemp("building")
    with attackable(request.param, directory, **settings) as found:
        found.client.timeout = 120
        yield found


def create(target: Target, *names: str, **fields: Any) -> httpx.Response:
    body = {"dependencies": [{"name": name} for name in names], "install_timeout": 60, **fields}
    return target.client.post("/api/v1/sessions", json=body)


def failed(target: Target, name: str) -> str:
    """Why a package could not be installed; nothing of it is left."""
    response = create(target, name)
    assert response.status_code == 422, response.text
    problem = response.json()
    assert problem["code"] == "dependency_failed"
    assert list((target.server.data_dir / "node" / "installs").iterdir()) == []
    return str(problem["detail"])


def log_of(target: Target, response: httpx.Response) -> str:
    session = response.json().get("session_id") or response.json()["id"]
    return target.client.get(f"/api/v1/sessions/{session}/dependencies/log").text


# Packages against the installer


@pytest.mark.quick
def test_a_build_runs_without_network_and_without_files_of_the_host(
    building: Target, index: Index
) -> None:
    secret = building.home / "secret"
    secret.write_text("of the host")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code = f"""
import socket, urllib.request
for address in (("127.0.0.1", {port}), ("127.0.0.1", {index.port}), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, 2)
        print("REACHED", address, flush=True)
    except OSError as error:
        print("no way to", address, flush=True)
key = {str(building.server.data_dir / "key")!r}
for path in ({str(secret)!r}, key, "/root/.ssh", "/etc/shadow"):
    print("SEEN" if os.path.exists(path) else "not there", path, flush=True)
print("variables", sorted(os.environ), flush=True)
for place in ("/usr/x", "/etc/x", "/opt/x", "/x", "/run/atoll/uv"):
    try:
        open(place, "ab").close()
        print("WROTE", place, flush=True)
    except OSError:
        print("read-only", place, flush=True)
raise SystemExit("enough")
"""
        index.add_source(f"nosy{port}", code=code)
        response = create(building, f"nosy{port}")
    assert response.status_code == 422
    log = log_of(building, response)
    assert "no way to" in log, log
    assert "not there" in log
    for bad in ("REACHED", "SEEN", "WROTE", "SECRET", "ATOLL_"):
        assert bad not in log, log


def test_the_gateway_serves_a_build_nothing_but_the_index(building: Target, index: Index) -> None:
    outside = Index()
    with outside:
        outside.add("elsewhere")
        code = f"""
import socket
def ask(line):
    with socket.socket(socket.AF_UNIX) as way:
        way.connect("/run/atoll/gateway.sock")
        way.sendall((line + " HTTP/1.1\\nHost: x\\nConnection: close\\n\\n").encode())
        answer = b""
        while data := way.recv(65536):
            answer += data
    print(line, "->", answer.split(b"\\r\\n")[0], flush=True)
for line in (
    "GET http://127.0.0.1:{outside.port}/simple/elsewhere/", "GET /", "GET /simple/",
    "GET /simple/../files/x", "GET /simple/%2e%2e/", "GET //127.0.0.1:{outside.port}/simple/",
    "GET /files/elsewhere-1.0-py3-none-any.whl", "GET /files/" + "0" * 32 + "/plain.whl",
    "POST /simple/plain/", "PUT /simple/plain/", "CONNECT 127.0.0.1:{outside.port}",
    "GET /simple/plain/?x=http://127.0.0.1/", "GET /simple/Plain/", "GET /simple/plain/",
):
    ask(line)
raise SystemExit("enough")
"""
        index.add_source(f"asks{outside.port}", code=code)
        log = log_of(building, create(building, f"asks{outside.port}"))
        assert outside.asked == []
    lines = [line for line in log.splitlines() if "->" in line]
    assert len({line for line in lines if "403" in line}) == 13, log
    assert {line.strip() for line in lines if "403" not in line} == {
        "GET /simple/plain/ -> b'HTTP/1.1 200 '"
    }


def test_processes_left_by_a_build_end_with_it(building: Target, index: Index) -> None:
    code = """
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 100)
    import time
    time.sleep(600)
"""
    name = f"leaves-{building.privileged}".lower()
    index.add_source(name, code=code)
    response = create(building, name)
    assert response.status_code == 201, response.text
    assert list((building.server.data_dir / "node" / "installs").iterdir()) == []
    building.client.delete(f"/api/v1/sessions/{response.json()['id']}")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("fills-disk", "with open('/build/x', 'wb') as f:\n    while True: f.write(bytes(1<<20))"),
        ("fills-disk-in-small", "import itertools\nfor i in itertools.count():\n"
         "    with open('/build/tmp/%d' % i, 'w') as f: f.write('x')"),
        ("fills-unnamed", """
import time
kept = []
for i in range(40):
    kept.append(open('/build/tmp/u%d' % i, 'wb'))
    os.unlink(kept[-1].name)
    kept[-1].write(bytes(8 << 20))
    kept[-1].flush()
for _ in range(200): time.sleep(0.1)
"""),
        ("fills-out-of-reach", """
import time
os.makedirs('/build/out', exist_ok=True)
os.mkdir('/build/out/%d' % os.getpid())
os.chdir('/build/out/%d' % os.getpid())
for i in range(100):
    os.mkdir('d' * 200)
    os.chdir('d' * 200)
for i in range(10):
    with open('x%d' % i, 'wb') as f: f.write(bytes(32 << 20))
for _ in range(200): time.sleep(0.1)
"""),
        ("fills-memory", "x = [bytearray(1<<20) for _ in range(4096)]"),
        ("never-stops-talking", "for _ in range(2000): print('x' * 65536)\nraise SystemExit(1)"),
    ],
)  # fmt: skip
def test_a_build_that_exhausts_resources_is_ended(
    building: Target, index: Index, name: str, code: str
) -> None:
    index.add_source(name, code=code)
    response = create(building, name)
    assert response.status_code == 422, response.text
    assert list((building.server.data_dir / "node" / "installs").iterdir()) == []
    assert len(log_of(building, response)) < 300 * 1024


def test_a_build_cannot_forge_its_result(building: Target, index: Index) -> None:
    """It can answer in the place of the program that started it, and is not believed."""
    code = """
import glob, json, socket
answer = json.dumps({"installed": ["../../x==1", "a==1 --evil"], "own": True}).encode()
for name in glob.glob("/proc/1/fd/*"):
    try:
        fd = os.open(name, os.O_RDWR)
        os.write(fd, answer)
    except OSError:
        pass
import ctypes
os.kill(1, 9)
raise SystemExit("enough")
"""
    index.add_source("makes-up", code=code)
    assert failed(building, "makes-up")


# Wheels


def hostile_wheel(index: Index, name: str, **about: Any) -> None:
    file, content, metadata = wheel(name, **about)
    index.packages[name] = {file: content}
    index.metadata[file] = metadata


@pytest.mark.parametrize("place", ["../outside.py", "../../../outside.py", "/tmp/outside.py"])
def test_a_wheel_cannot_write_outside_its_directory(
    building: Target, index: Index, place: str
) -> None:
    name = f"climbs{len(place)}"
    hostile_wheel(index, name, files={place: "print('out')"})
    response = create(building, name)
    node = building.server.data_dir / "node"
    assert not list(node.rglob("outside.py")) or all(
        "packages" in path.parts and path.parent.name != "packages"
        for path in node.rglob("outside.py")
    )
    if response.status_code == 201:
        building.client.delete(f"/api/v1/sessions/{response.json()['id']}")
    else:
        assert response.json()["code"] == "dependency_failed"


@pytest.mark.quick
def test_a_wheel_with_a_link_to_the_outside_reveals_nothing_of_the_host(
    building: Target, index: Index
) -> None:
    hostile_wheel(index, "linked", links={"linked_to": "/etc/passwd", "up": "../../.."})
    response = create(building, "linked")
    if response.status_code == 201:
        node = building.server.data_dir / "node" / "packages"
        assert not [path for path in node.rglob("*") if path.is_symlink()]
        building.client.delete(f"/api/v1/sessions/{response.json()['id']}")


@pytest.mark.quick
def test_a_wheel_of_realistic_depth_is_installed_and_a_deeper_one_fails_for_good(
    building: Target, index: Index
) -> None:
    index.add("deep", files={"d/" * 40 + "f.txt": "reached"})
    response = create(building, "deep")
    assert response.status_code == 201, response.text
    building.client.delete(f"/api/v1/sessions/{response.json()['id']}")
    index.add("deepest", files={"d/" * 990 + "f.txt": "x"})
    response = create(building, "deepest")
    assert response.status_code == 422, response.text
    assert response.json()["code"] == "dependency_failed"
    session = building.client.get(f"/api/v1/sessions/{response.json()['session_id']}").json()
    assert session["status"] == "failed"


def test_a_build_with_links_or_special_files_is_refused(building: Target, index: Index) -> None:
    for name, code in (
        ("link-out", "os.symlink('/etc', '/build/target/link')"),
        ("link-up", "os.symlink('../../..', '/build/target/link')"),
        ("a-pipe", "os.mkfifo('/build/target/p')"),
    ):
        # Once: it is built to know its metadata, and again to be installed.
        once = "if not os.path.exists('/build/target'):\n    os.mkdir('/build/target')\n    "
        index.add_source(name, code=once + code)
        assert "No package lists the file" in failed(building, name)


def test_installed_files_belong_to_root_with_plain_permissions(
    building: Target, index: Index
) -> None:
    """
    Also if a build, which is repeated for the installation, has changed files of other packages.
    """
    code = """
for place, _, names in os.walk("/build/target"):
    for name in names:
        os.chmod(os.path.join(place, name), 0o6777)
os.umask(0)
"""
    index.add("beside", files={"beside_data/x.txt": "x"})
    index.add_source("setuid", code=code)
    response = create(building, "beside", "setuid")
    assert response.status_code == 201, response.text
    found = _files(building)
    assert {path.name for path in found} >= {"x.txt", "setuid.py"}
    assert {path.stat().st_mode & 0o7022 for path in found} == {0}
    if building.privileged:
        assert {path.stat().st_uid for path in found} == {0}
    building.client.delete(f"/api/v1/sessions/{response.json()['id']}")


def _files(target: Target) -> list[Path]:
    """All that is installed, by root's eyes or by names that are known."""
    node = target.server.data_dir / "node"
    names = [path.name for path in (node / "package-records").iterdir()]
    found: list[Path] = []
    for name in names:
        place = node / "packages" / name
        if place.is_dir() and len(name) == 40:
            found += [path for path in place.rglob("*") if path.is_file()]
    return found


# Sessions against packages


def test_code_finds_the_packages_of_its_session_and_no_others(building: Target) -> None:
    response = create(building, "plain")
    assert response.status_code == 201, response.text
    mine = building.box(dependencies=[{"name": "plain"}])
    other = building.box()
    place = mine.run("import plain; print(plain.__file__)")["stdout"].strip()
    assert place.startswith("/opt/atoll/packages/")
    code = """
import os
tries = {
    "list": lambda: os.listdir("/opt/atoll/packages"),
    "open": lambda: os.listdir(os.open("/opt/atoll/packages", os.O_RDONLY)),
    "write": lambda: open("/opt/atoll/packages/x", "w"),
    "remove": lambda: os.rmdir("/opt/atoll/packages"),
    "rights": lambda: os.chmod("/opt/atoll/packages", 0o777),
    "bytecode": lambda: open(PLACE, "a"),
    "rename": lambda: os.rename(os.path.dirname(PLACE), "/workspace/x"),
    "link": lambda: os.link(PLACE, "/workspace/x"),
}
for name, work in tries.items():
    try:
        work()
        print("DONE", name)
    except OSError as error:
        print("refused", name)
""".replace("PLACE", repr(place))
    for box in (mine, other):
        assert "DONE" not in box.run(code)["stdout"]
    assert other.run("import plain")["exit_code"] == 1
    for url in (mine.url, other.url, f"/api/v1/sessions/{response.json()['id']}"):
        building.client.delete(url)


def test_many_concurrent_installations_do_not_block_other_requests(
    building: Target, index: Index
) -> None:
    held = [index.hold(f"/simple/slow{number}/") for number in range(3)]
    sessions = []

    def ask(number: int) -> None:
        sessions.append(create(building, f"slow{number}"))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert held[0].asked.wait(30) or held[1].asked.wait(30)
        box = building.box()
        assert box.run("print(1)")["stdout"] == "1\n"
        building.client.delete(box.url)
    finally:
        for each in held:
            each.go.set()
        for thread in threads:
            thread.join(60)
    assert [response.status_code for response in sessions] == [422, 422, 422]
