"""
Volumes and workspaces in the bucket, by a real s3fs on a real S3 server: shared between sessions,
without credentials inside, and nothing hangs when one of the two dies.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from atoll.drivers.shared import cgroups
from atoll.drivers.shared.volumes import node_volumes
from atoll.drivers.shared.volumes.bucket_mounts import GROUP, OPEN_FILES, PROCESSES
from atoll.settings import LocalSettings
from tests.e2e.api import V1, Api, answer, eventually, problem, session, sh
from tests.harness import Server
from tests.missing import missing
from tests.servers.s3 import ACCESS_KEY, SECRET_KEY, S3Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CGROUPS = Path("/sys/fs/cgroup")
MEMORY = 64 * 2**20
QUICK = {f"{node_volumes.__name__}.MOUNT_TIMEOUT": 5.0}
"""Bytes that an s3fs may use."""
CROWD = """
import contextlib, threading

def write(place, number):
    with contextlib.suppress(OSError):
        open(f"{place}/{number}", "wb").write(bytes(10_000))

for place in ("/workspace", "/data/shared"):
    threads = [threading.Thread(target=write, args=(place, number)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount for others")


@pytest.fixture(scope="module")
def s3fs() -> None:
    if shutil.which("s3fs") is None:
        missing("s3fs is not installed")


@pytest.fixture(scope="module")
def node(
    s3: S3Server, s3fs: None, bubblewrap: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("mounts")
    env = s3.environment(
        ATOLL_BLOB__URL="s3://atoll/mounts-test",
        ATOLL_POOL__SIZE="1",
        ATOLL_LOCAL__MOUNT_SCRATCH=str(128 * 2**20),
        ATOLL_LOCAL__MOUNT_MEMORY=str(MEMORY),
    )
    with Server(directory, **env) as server:
        yield server
    assert mounted(server) == []
    assert processes(server) == []
    assert groups(server) == []


@pytest.fixture
def api(node: Server) -> Iterator[Api]:
    with node.client() as http:
        yield Api(http)


def mounted(server: Server) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if f"{server.data_dir}/node/mounts" in line]


def processes(server: Server) -> list[int]:
    """The s3fs of this server."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue  # It ended.
        if words[0].endswith(b"s3fs") and str(server.data_dir).encode() in b" ".join(words):
            found.append(int(path.parent.name))
    return found


def groups(server: Server) -> list[str]:
    """Control groups of mounts of this server."""
    found = cgroups.node_groups(LocalSettings(), server.data_dir / "node")
    names = [name for name in found.names() if name.startswith(GROUP)]
    found.close()
    return names


def group_of(pid: int, controller: str) -> Path:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return CGROUPS / controller / path[1:]
    return CGROUPS / path[1:]  # Version 2 has one line, which comes last.


def memory_limit(pid: int) -> Path:
    group = group_of(pid, "memory")
    return next(p for n in ("memory.max", "memory.limit_in_bytes") if (p := group / n).exists())


def given(name: str, path: str = "/data/shared", *, read_only: bool = False) -> dict[str, Any]:
    return {"volume_id": name, "path": path, "read_only": read_only}


@contextmanager
def volume(api: Api, name: str) -> Iterator[str]:
    made = answer(api.http.post(f"{V1}/volumes", json={"id": name}), 201)
    assert (made["kind"], made["node_id"], made["size"]) == ("s3", None, None)
    try:
        yield name
    finally:
        eventually(lambda: api.http.delete(f"{V1}/volumes/{name}").status_code == 204)


def fails(api: Api, session_id: str, line: str) -> str:
    result = api.run(session_id, command=["sh", "-c", line], timeout=60, wait=60)
    assert result["exit_code"] != 0, result
    return str(result["stderr"])


def end_instance(server: Server, api: Api, session_id: str) -> None:
    instance = api.get(session_id)["container_id"]
    handle = server.data_dir / "node" / "instances" / instance / "handle.json"
    os.kill(json.loads(handle.read_text())["data"]["child"], signal.SIGKILL)


# Volumes


def test_two_sessions_share_a_volume(api: Api, node: Server, s3: S3Server) -> None:
    with (
        volume(api, "shared") as name,
        session(api, given(name)) as first,
        session(api, given(name)) as second,
    ):
        assert len(processes(node)) == 1
        sh(api, first, "echo one > /data/shared/file; mkdir /data/shared/made")
        assert sh(api, second, "cat /data/shared/file") == "one\n"
        sh(api, second, "echo two >> /data/shared/file; echo deep > /data/shared/made/deep")
        assert sh(api, first, "cat /data/shared/file /data/shared/made/deep") == "one\ntwo\ndeep\n"
        stored = s3.store().get("mounts-test/volumes/shared/file").bytes()
        assert bytes(stored) == b"one\ntwo\n"
        sh(api, first, "rm -r /data/shared/made; mv /data/shared/file /data/shared/moved")
        assert sh(api, second, "ls /data/shared") == "moved\n"


def test_a_read_only_volume_cannot_be_written(api: Api) -> None:
    with (
        volume(api, "ro") as name,
        session(api, given(name)) as writer,
        session(api, given(name, read_only=True)) as reader,
    ):
        sh(api, writer, "echo text > /data/shared/file")
        for line in (
            "echo more >> /data/shared/file",
            "rm /data/shared/file",
            "touch /data/shared/new",
            "mount -o remount,rw /data/shared",
        ):
            fails(api, reader, line)
        assert sh(api, reader, "cat /data/shared/file") == "text\n"


def test_a_removed_volume_leaves_the_bucket_and_a_recreated_one_is_empty(
    api: Api, s3: S3Server
) -> None:
    odd = "/data/shared/'with a space, ü and %2F'"
    for _ in range(2):
        with volume(api, "again") as name, session(api, given(name)) as one:
            assert sh(api, one, "ls -A /data/shared") == ""
            sh(api, one, f"mkdir -p {odd}/deep; echo x > {odd}/deep/file; touch /data/shared/y")
        left = [
            item["path"] for page in s3.store().list("mounts-test/volumes/again") for item in page
        ]
        assert left == []


def test_a_writer_fills_only_the_scratch_space_of_its_mount(api: Api, node: Server) -> None:
    with volume(api, "large") as name, session(api, given(name), disk="1Gi") as one:
        sh(api, one, "head -c 80000000 /dev/zero | tr '\\0' x > /data/shared/big")
        assert sh(api, one, "tr -d x < /data/shared/big | wc -c; wc -c < /data/shared/big") == (
            "0\n80000000\n"
        )
        fails(api, one, "head -c 300000000 /dev/zero > /data/shared/bigger")
        sh(api, one, "rm -f /data/shared/bigger; echo fine > /data/shared/small")
        assert sh(api, one, "cat /data/shared/small") == "fine\n"
        # Space that the session did not use: s3fs stayed within its own limits.
        [pid] = processes(node)
        assert int(memory_limit(pid).read_text()) == MEMORY
        assert int((group_of(pid, "pids") / "pids.max").read_text()) <= PROCESSES + 1
        assert group_of(pid, "cpu").parts[-2:] != group_of(os.getpid(), "cpu").parts[-2:]
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (OPEN_FILES, OPEN_FILES)
        assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)


# What code inside could do with it


def test_sandbox_and_command_lines_contain_no_credentials(api: Api, node: Server) -> None:
    look = (
        "cat /proc/self/mountinfo /proc/mounts /proc/*/environ /proc/*/cmdline /proc/*/mountinfo "
        "2>/dev/null; env; ls -la /data/shared /proc/1/root /proc/self/fd 2>&1; true"
    )
    with volume(api, "hostile") as name, session(api, given(name), workspace_mode="mount") as one:
        seen = sh(api, one, look)
        for secret in (ACCESS_KEY, SECRET_KEY, "passwd"):
            assert secret not in seen
        for line in seen.splitlines():
            if "fuse.s3fs" in line and " - " in line:
                assert line.split()[3] == "/"
                assert {"nosuid", "nodev"} <= set(line.split()[5].split(","))
        for pid in processes(node):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            assert SECRET_KEY.encode() not in words
            assert SECRET_KEY.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        passwords = node.data_dir / "node" / "s3fs.passwd"
        assert passwords.stat().st_mode & 0o777 == 0o600
        assert passwords.stat().st_uid == 0
        # s3fs is not among the processes that it sees, and cannot be reached by them.
        assert "s3fs" not in sh(api, one, "cat /proc/*/comm")


def test_a_volume_gives_no_device_no_other_user_and_no_way_out(api: Api, node: Server) -> None:
    with (
        volume(api, "trap") as name,
        session(api, given(name)) as one,
        session(api) as without,
    ):
        fails(api, one, "mknod /data/shared/d b 7 0")
        sh(api, one, "cp /bin/sh /data/shared/sh; chmod 6755 /data/shared/sh")
        assert sh(api, one, "/data/shared/sh -p -c 'id -u'") == "1000\n"
        sh(api, one, f"ln -s {node.data_dir}/key /data/shared/key; ln -s / /data/shared/root")
        fails(api, one, "cat /data/shared/key")
        assert sh(api, one, "ls /data/shared/root/") == sh(api, one, "ls /")
        assert sh(api, one, "ls /data/shared/..") == "shared\n"
        fails(api, without, "ls /data")
        assert "s3fs" not in sh(api, without, "cat /proc/self/mountinfo")


def test_names_that_s3_cannot_list_are_reported_and_delay_no_other_session(
    api: Api, node: Server, s3: S3Server
) -> None:
    for number, name in enumerate(
        ("line\n", "return\r", "%2e%2e%2fx", "..%2f", "a?b#c&d", "\u202e")
    ):
        with volume(api, f"odd-{number}") as odd, session(api, given(odd)) as one:
            result = api.run(one, f"open('/data/shared/' + {name!r}, 'w').write('x')")
            assert result["status"] == "success", result
    answer(api.http.post(f"{V1}/volumes", json={"id": "unlistable"}), 201)
    with session(api, given("unlistable")) as one:
        api.run(
            one, "for name in '\\1 \\x1b'.split(): open('/data/shared/' + name, 'w').write('x')"
        )
    eventually(lambda: len(mounted(node)) == 0)
    refused = api.http.delete(f"{V1}/volumes/unlistable")
    assert str(node.data_dir) not in problem(refused, 409, "volume_not_emptied")["detail"]
    # The store did not count as unavailable, which would affect all sessions.
    assert "blobs.away" not in node.stderr()
    answer(api.http.get(f"{V1}/volumes/unlistable"))


def test_objects_written_by_other_programs_do_no_harm(api: Api, node: Server, s3: S3Server) -> None:
    answer(api.http.post(f"{V1}/volumes", json={"id": "outside"}), 201)
    place = "mounts-test/volumes/outside"
    hostile = {
        "sh": {"mode": str(0o104755), "uid": "0", "gid": "0"},
        "device": {"mode": str(0o060666), "uid": "0"},
        "garbage": {"mode": "x", "uid": "-1", "gid": "9" * 30, "mtime": "nan", "ctime": "x" * 999},
        "no type": {"mode": "-1"},
        "zip": {"Content-Encoding": "gzip", "Content-Type": "text/html"},
    }
    for name, about in hostile.items():
        content = Path("/bin/sh").read_bytes() if name == "sh" else b"content"
        s3.store().put(f"{place}/{name}", content, attributes=about)
    s3.store().put(f"{place}/link", f"{node.data_dir}/key".encode(),
                   attributes={"mode": str(0o120777)})  # fmt: skip
    # SeaweedFS does not remove the last one: it takes the name for a path that leads up.
    for name in ("-rf", "$(id)", "%2e%2e%2fx", "d/" * 100 + "deep", "control\1", "\\..\\up"):
        s3.plant(f"{place}/{name}", b"planted")
    with session(api, given("outside")) as one, session(api) as other:
        before = processes(node)
        seen = sh(api, one, "ls -A /data/shared 2>/dev/null || true")
        assert {*hostile, "link", "-rf", "$(id)", "%2e%2e%2fx"} <= set(seen.splitlines())
        assert sh(api, one, "/data/shared/sh -p -c 'id -u'") == "1000\n"
        assert sh(api, one, "cd /data/shared; cat garbage zip ./-rf") == "contentcontentplanted"
        for name in ("device", "link", "'no type'"):
            fails(api, one, f"cat /data/shared/{name}")
        # Replaced while it is read: all of one of them.
        s3.store().put(f"{place}/swapped", b"a" * 3_000_000)
        sh(api, one, "exec 3< /data/shared/swapped; head -c 1 <&3; "
           "(until [ -e go ]; do sleep 0.05; done; wc -c; ) <&3 > size &")  # fmt: skip
        s3.store().put(f"{place}/swapped", b"b" * 2_000_000)
        api.put(one, "go")
        eventually(lambda: sh(api, one, "cat size") in ("2999999\n", "1999999\n"))
        assert processes(node) == before
        assert sh(api, other, "echo fine") == "fine\n"
    eventually(lambda: len(mounted(node)) == 0)
    refused = api.http.delete(f"{V1}/volumes/outside")
    assert str(node.data_dir) not in problem(refused, 409, "volume_not_emptied")["detail"]
    assert "blobs.away" not in node.stderr()


# Workspaces


def test_a_mounted_workspace_is_the_bucket_and_outlives_its_instance(
    api: Api, node: Server, s3: S3Server
) -> None:
    with session(api, workspace_mode="mount") as one:
        api.put(one, "uploaded", b"by the API")
        output = api.run(one, "open('made', 'w').write('by code')\nprint(open('uploaded').read())")
        assert output["stdout"] == "by the API\n"
        assert "made" in [artifact.split("/")[-1] for artifact in output["artifacts"]]
        stored = s3.store().get(f"mounts-test/mounts/{one}/made").bytes()
        assert bytes(stored) == b"by code"
        fails(api, one, "touch /etc/x")
        before = api.get(one)["container_id"]
        end_instance(node, api, one)
        assert sh(api, one, "cat made uploaded") == "by codeby the API"
        assert api.get(one)["container_id"] != before
        assert sorted(api.names(one)) == ["made", "uploaded"]
    eventually(lambda: mounted(node) == [])
    # It stays for as long as workspaces are kept.
    assert bytes(s3.store().get(f"mounts-test/mounts/{one}/made").bytes()) == b"by code"


def test_only_its_session_sees_a_mounted_workspace(api: Api) -> None:
    with session(api, workspace_mode="mount") as one, session(api, workspace_mode="mount") as two:
        sh(api, one, "echo mine > file")
        assert sh(api, two, "ls") == ""
        assert sh(api, one, "stat -c %U:%a file") == "sandbox:700\n"


# Deaths


def starve(pid: int) -> None:
    """The next work that it gets is more than its memory: the kernel kills it."""
    limit = memory_limit(pid)
    assert GROUP in str(limit), "another group, such as that of the tests, is not to be touched"
    used = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
    limit.write_text(str(int((limit.parent / used[limit.name]).read_text()) + 2**16))


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize("harm", [starve, stop])
def test_an_s3fs_that_died_or_hangs_is_replaced_automatically(
    s3: S3Server, s3fs: None, bubblewrap: str, tmp_path: Path, harm: Callable[[int], None]
) -> None:
    env = s3.environment(
        ATOLL_BLOB__URL=f"s3://atoll/broken-{harm.__name__}",
        ATOLL_SESSION__SWEEP="0.5",
    )
    with Server(tmp_path, **env).with_constants(QUICK) as server, server.client() as http:
        api = Api(http)
        with (
            volume(api, "v") as name,
            session(api, given(name), workspace_mode="mount") as one,
            session(api) as other,
        ):
            sh(api, one, "echo kept > /data/shared/file; echo here > file")
            # Nothing ends a process that has a file open there before s3fs answers or is gone.
            sh(api, one, "sleep 600 > /data/shared/open 2> open < /dev/null &")
            before = processes(server)
            assert len(before) == 2
            stays = api.get(other)["container_id"]
            for pid in before:
                harm(pid)
            if harm is starve:
                api.submit(one, CROWD, timeout=20)
            came = ["sh", "-c", "cat /data/shared/file file"]

            def has_recovered() -> bool:
                response = api.execute(one, command=came, timeout=5, wait=30)
                assert response.status_code in (200, 202), response.text
                return bool(response.json().get("stdout") == "kept\nhere\n")

            eventually(has_recovered, 120)
            assert not set(before) & set(processes(server))
            assert api.get(other)["container_id"] == stays
            assert ("mount.out_of_memory" in server.stderr()) == (harm is starve)


def test_the_next_server_adopts_mounts_of_a_killed_one(
    s3: S3Server, s3fs: None, bubblewrap: str, tmp_path: Path
) -> None:
    env = s3.environment(ATOLL_BLOB__URL="s3://atoll/killed", ATOLL_POOL__SIZE="0")
    with Server(tmp_path, **env) as server:
        with server.client() as http:
            api = Api(http)
            answer(api.http.post(f"{V1}/volumes", json={"id": "v"}), 201)
            one = api.create(volumes=[given("v")], workspace_mode="mount", timeout=600)["id"]
            sh(api, one, "echo kept > /data/shared/file; echo here > file")
        before = processes(server)
        assert len(before) == len(groups(server)) == 2
        server.stop(signal.SIGKILL)
        server.start()
        with server.client() as http:
            api = Api(http)
            assert processes(server) == before
            assert sh(api, one, "cat /data/shared/file file") == "kept\nhere\n"
            end_instance(server, api, one)
            assert sh(api, one, "cat /data/shared/file file") == "kept\nhere\n"
            api.end(one)
            eventually(lambda: processes(server) == [])
            eventually(lambda: mounted(server) == [])
            eventually(lambda: groups(server) == [])


def test_files_give_errors_while_s3_is_unavailable_and_the_api_responds(
    s3fs: None, bubblewrap: str, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    with S3Server(tmp_path) as own:
        env = own.environment(ATOLL_BLOB__CONNECT_TIMEOUT="1", ATOLL_BLOB__TIMEOUT="3")
        with Server(tmp_path / "data", **env) as server, server.client() as http:
            api = Api(http)
            for name in ("v", "unused"):
                answer(api.http.post(f"{V1}/volumes", json={"id": name}), 201)
            one = api.create(volumes=[given("v")], timeout=600)["id"]
            sh(api, one, "echo before > /data/shared/file")
            own.store().put("atoll/volumes/unused/file", b"kept")
            own.kill()
            assert http.delete(f"{V1}/volumes/unused").status_code == 503
            fails(api, one, "echo more > /data/shared/new && sync && cat /data/shared/new")
            # The rest of the session, other sessions and the API still work.
            assert sh(api, one, "echo fine > /workspace/x; cat /workspace/x") == "fine\n"
            other = api.create()["id"]
            assert sh(api, other, "echo fine") == "fine\n"
            refused = http.post(f"{V1}/sessions", json={"workspace_mode": "mount"})
            problem(refused, 503, "volume_unavailable")
            problem(http.post(f"{V1}/volumes", json={"id": "w"}), 503, "volume_unavailable")
            own.start()
            eventually(lambda: "before" in api.run(
                one, command=["cat", "/data/shared/file"])["stdout"], 30)  # fmt: skip
            # The volume that could not be removed is complete, also later.
            eventually(lambda: "blobs.back" in server.stderr())
            with session(api, given("unused")) as user:
                assert sh(api, user, "cat /data/shared/file") == "kept"
            eventually(lambda: http.delete(f"{V1}/volumes/unused").status_code == 204)
            for each in (one, other):
                api.end(each)


def test_a_hanging_s3_server_delays_only_sessions_that_use_it(
    s3fs: None, bubblewrap: str, tmp_path: Path
) -> None:
    """As many as asyncio has threads; and a process that waits for S3 cannot be ended."""
    (tmp_path / "data").mkdir()
    many = min(32, (os.cpu_count() or 1) + 4)
    with S3Server(tmp_path) as own:
        env = own.environment(
            ATOLL_BLOB__CONNECT_TIMEOUT="1",
            ATOLL_BLOB__TIMEOUT="15",
            ATOLL_POOL__SIZE="0",
        )
        with (
            Server(tmp_path / "data", **env).with_constants(QUICK) as server,
            server.client() as http,
        ):
            api = Api(http)
            waiting = api.create(workspace_mode="mount", timeout=600)["id"]
            sh(api, waiting, "echo here > file")
            own.pause()
            try:
                with ThreadPoolExecutor(many + 2) as clients:
                    asked = [
                        clients.submit(
                            http.post,
                            f"{V1}/sessions",
                            json={"workspace_mode": "mount"},
                            timeout=120,
                        )
                        for _ in range(many)
                    ]
                    stuck = clients.submit(
                        api.run, waiting, command=["cat", "absent"], timeout=1, wait=60
                    )
                    other = clients.submit(api.create)
                    begun: list[Future[Any]] = [*asked, other]
                    wait(begun, return_when=FIRST_COMPLETED)
                    assert other.done()
                    assert sh(api, other.result()["id"], "echo fine") == "fine\n"
                    result = stuck.result()
                    assert (result["status"], result["cause"]) == ("timeout", "timeout"), result
                    own.resume()
                    for each in asked:
                        if each.result().status_code == 201:
                            api.end(each.result().json()["id"])
                        else:
                            problem(each.result(), 503, "volume_unavailable")
            finally:
                own.resume()
            eventually(lambda: sh(api, waiting, "cat file") == "here\n", 60)
            for each in (waiting, other.result()["id"]):
                api.end(each)
