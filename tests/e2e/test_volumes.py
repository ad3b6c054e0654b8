"""Volumes on the disk of a node: shared, limited, and visible only to their sessions."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from atoll import Atoll, Mount
from tests import drivers, unprivileged
from tests.e2e.api import V1, Api, answer, eventually, problem, session, sh
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount images"),
    pytest.mark.quick,
]

MiB = 2**20
NUMBERS = itertools.count(1)


@contextmanager
def calling(server: Server) -> Iterator[Api]:
    with server.client() as http:
        yield Api(http)


def make(api: Api, name: str, **fields: Any) -> dict[str, Any]:
    body = {"id": name, "kind": "local", "size": "32Mi", **fields}
    return answer(api.http.post(f"{V1}/volumes", json=body), 201)


def given(name: str, path: str = "/data/shared", *, read_only: bool = False) -> dict[str, Any]:
    return {"volume_id": name, "path": path, "read_only": read_only}


@pytest.fixture
def volume(api: Api) -> Iterator[str]:
    name = f"volume-{next(NUMBERS)}"
    make(api, name)
    yield name
    eventually(lambda: api.http.delete(f"{V1}/volumes/{name}").status_code in (204, 404))


def mounted(server: Server) -> list[str]:
    """Volumes alone: workspaces may be mounted beside them."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if f"{server.data_dir}/node/mounts/volume-" in line]


def test_files_written_by_one_session_can_be_read_and_changed_by_another(
    api: Api, volume: str
) -> None:
    with (
        session(api, given(volume)) as first,
        session(api, given(volume, "/mnt/a/b")) as second,
    ):
        sh(api, first, "echo one > /data/shared/file; mkdir /data/shared/made")
        assert sh(api, second, "cat /mnt/a/b/file") == "one\n"
        sh(api, second, "echo two >> /mnt/a/b/file; echo x > /mnt/a/b/made/deep; mkdir /mnt/a/b/m2")
        sh(api, first, "echo three >> /data/shared/made/deep; touch /data/shared/m2/too")
        assert sh(api, second, "cat /mnt/a/b/file /mnt/a/b/made/deep") == "one\ntwo\nx\nthree\n"
        sh(api, second, "rm -r /mnt/a/b/made /mnt/a/b/file")
        assert sh(api, first, "ls /data/shared") == "m2\n"


def test_a_volume_outlives_its_sessions(api: Api, volume: str) -> None:
    with session(api, given(volume)) as one:
        sh(api, one, "echo kept > /data/shared/file")
    with session(api, given(volume, read_only=True)) as other:
        assert sh(api, other, "cat /data/shared/file") == "kept\n"


def test_a_read_only_volume_cannot_be_written(api: Api, volume: str) -> None:
    with (
        session(api, given(volume)) as writer,
        session(
            api,
            given(volume, read_only=True),
        ) as one,
    ):
        sh(api, writer, "echo text > /data/shared/file; chmod 777 /data/shared/file")
        for line in (
            "echo more >> /data/shared/file",
            "rm /data/shared/file",
            "mv /data/shared/file /data/shared/other",
            "touch /data/shared/new",
            "chmod 600 /data/shared/file",
            "ln /data/shared/file /workspace/link",
            "mount -o remount,rw /data/shared",
            "unshare -Urm mount -o remount,rw,bind /data/shared",
        ):
            assert api.run(one, command=["sh", "-c", line])["exit_code"] != 0, line
        write = "fd = __import__('os').open('/data/shared/file', 2)"
        assert "Read-only file system" in api.run(one, write)["stderr"]
        assert sh(api, one, "cat /data/shared/file") == "text\n"


def test_the_size_of_a_volume_is_enforced(api: Api, volume: str) -> None:
    with session(api, given(volume), disk="512Mi") as one:
        result = api.run(one, command=["sh", "-c", "cat /dev/zero > /data/shared/big"])
        assert "No space left" in result["stderr"]
        size = int(sh(api, one, "stat -c %s /data/shared/big"))
        assert 16 * MiB < size < 32 * MiB


def test_devices_and_setuid_files_on_a_volume_have_no_effect(api: Api, volume: str) -> None:
    with session(api, given(volume)) as one:
        options = sh(api, one, "grep ' /data/shared ' /proc/self/mountinfo").split()[5].split(",")
        assert {"rw", "nosuid", "nodev"} <= set(options)
        assert api.run(one, command=["mknod", "/data/shared/d", "b", "7", "0"])["exit_code"] != 0
        sh(api, one, "cp /bin/sh /data/shared/sh; chmod 6755 /data/shared/sh")
        own = sh(api, one, "id -u; id -g")
        assert sh(api, one, "/data/shared/sh -p -c 'id -u; id -g'") == own
    with session(api, given(volume)) as other:
        own = sh(api, other, "id -u")
        assert sh(api, other, "/data/shared/sh -p -c 'id -u'") == own


def test_links_on_a_volume_do_not_lead_to_the_host(api: Api, volume: str, server: Server) -> None:
    secret = server.data_dir / "key"
    with session(api, given(volume)) as one:
        sh(api, one, f"ln -s {secret} /data/shared/key; ln -s / /data/shared/root")
        assert api.run(one, command=["cat", "/data/shared/key"])["exit_code"] != 0
        assert sh(api, one, "ls /data/shared/root/") == sh(api, one, "ls /")
        assert sh(api, one, "ls /data/shared/..") == "shared\n"
        assert sh(api, one, "ls /data/shared/../..") == sh(api, one, "ls /")
        line = sh(api, one, "grep ' /data/shared ' /proc/self/mountinfo")
        assert line.split()[3] == "/"
        assert str(server.data_dir) not in line


@pytest.mark.slow
@pytest.mark.every_driver
def test_a_session_without_the_volume_cannot_see_it(api: Api, volume: str) -> None:
    with (
        session(api, given(volume)) as one,
        session(api) as other,
    ):
        sh(api, one, "echo mine > /data/shared/file")
        assert api.run(other, command=["ls", "/data"])["exit_code"] != 0
        places = "cut -d' ' -f5 /proc/self/mountinfo"
        assert "/data" not in sh(api, other, places)
        pooled = api.create()["id"]
        assert "/data" not in sh(api, pooled, places)
        api.end(pooled)


def test_a_replaced_instance_keeps_its_volumes(api: Api, server: Server, volume: str) -> None:
    with session(api, given(volume)) as one:
        sh(api, one, "echo before > /data/shared/file")
        before = api.get(one)["container_id"]
        os.kill(drivers.handle(server.data_dir, before)["child"], signal.SIGKILL)
        assert sh(api, one, "cat /data/shared/file") == "before\n"
        assert api.get(one)["container_id"] != before


def test_a_volume_is_mounted_as_long_as_a_session_uses_it(
    api: Api, server: Server, volume: str
) -> None:
    before = mounted(server)
    with session(api, given(volume)):
        with session(
            api,
            given(volume, read_only=True),
        ):
            assert len(mounted(server)) == len(before) + 1
        eventually(lambda: len(mounted(server)) == len(before) + 1)
    eventually(lambda: len(mounted(server)) == len(before))


def test_a_volume_in_use_cannot_be_removed(api: Api) -> None:
    make(api, "wanted")
    with session(api, given("wanted")) as one:
        refused = api.http.delete(f"{V1}/volumes/wanted")
        assert problem(refused, 409, "volume_in_use")["session_id"] == one
        sh(api, one, "echo still > /data/shared/file; cat /data/shared/file")
    eventually(lambda: api.http.delete(f"{V1}/volumes/wanted").status_code == 204)
    problem(api.http.get(f"{V1}/volumes/wanted"), 404, "volume_not_found")
    problem(api.http.delete(f"{V1}/volumes/wanted"), 404, "volume_not_found")


def test_a_recreated_volume_is_empty(api: Api) -> None:
    for _ in range(2):
        make(api, "again")
        with session(api, given("again")) as one:
            assert sh(api, one, "ls -A /data/shared") == ""
            sh(api, one, "echo secret > /data/shared/file")
        eventually(lambda: api.http.delete(f"{V1}/volumes/again").status_code == 204)


def test_volumes_are_listed_and_their_names_are_unique(api: Api, volume: str) -> None:
    listed = answer(api.http.get(f"{V1}/volumes"))["items"]
    shown = answer(api.http.get(f"{V1}/volumes/{volume}"))
    assert shown in listed
    assert (shown["kind"], shown["size"], shown["node_id"]) == ("local", "32Mi", "local")
    again = api.http.post(
        f"{V1}/volumes",
        json={
            "id": volume,
            "kind": "local",
        },
    )
    problem(again, 409, "volume_exists")


@pytest.mark.parametrize(
    ("volumes", "status", "code"),
    [
        ([given("no-such")], 404, "volume_not_found"),
        ([given("a", "/data/x"), given("b", "/data/x")], 422, "invalid_request"),
        ([given("a", "/data/x"), given("b", "/data/x/y")], 422, "invalid_request"),
        ([given("a", "/etc/x")], 422, "invalid_request"),
        ([given("a", "/data")], 422, "invalid_request"),
        ([given("a", "/data/../etc")], 422, "invalid_request"),
        ([given("../../etc", "/data/x")], 422, "invalid_request"),
    ],
    ids=["unknown", "same", "nested", "outside", "top", "dots", "name"],
)
def test_invalid_volumes_of_a_session_are_refused(
    api: Api, volumes: list[dict[str, Any]], status: int, code: str
) -> None:
    problem(api.http.post(f"{V1}/sessions", json={"volumes": volumes}), status, code)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"id": "x", "kind": "s3"}, "mount_unavailable"),
        ({"id": "x", "kind": "nfs"}, "invalid_request"),
        ({"id": "../x"}, "invalid_request"),
        ({"id": "x", "size": "many"}, "invalid_request"),
        ({"id": "x", "size": "1000000Gi"}, "invalid_request"),
    ],
)
def test_an_invalid_volume_is_refused(api: Api, fields: dict[str, Any], code: str) -> None:
    problem(api.http.post(f"{V1}/volumes", json=fields), 422, code)


def test_without_a_bucket_no_workspace_can_be_mounted(api: Api) -> None:
    refused = api.http.post(f"{V1}/sessions", json={"workspace_mode": "mount"})
    assert "blob.url" in problem(refused, 422, "mount_unavailable")["detail"]


def test_the_next_server_uses_and_clears_mounts_of_a_killed_server(
    bubblewrap: str, tmp_path: Path
) -> None:
    with Server(tmp_path, ATOLL_POOL__SIZE="0") as server:
        with calling(server) as api:
            make(api, "a")
            make(api, "b")
            stays = api.create(volumes=[given("a")], timeout=600)["id"]
            goes = api.create(volumes=[given("b")], timeout=600)["id"]
            sh(api, stays, "echo kept > /data/shared/file")
            instance = api.get(goes)["container_id"]
        server.stop(signal.SIGKILL)
        assert len(mounted(server)) == 2
        # One instance disappears unnoticed, as in a crash of the machine.
        (tmp_path / "node" / "instances" / instance / "mounts.json").unlink()
        server.start()
        assert len(mounted(server)) == 1
        with calling(server) as api:
            assert sh(api, stays, "cat /data/shared/file") == "kept\n"
            api.end(stays)
            api.end(goes)
            eventually(lambda: mounted(server) == [])
            again = api.create(volumes=[given("a", read_only=True)])["id"]
            assert sh(api, again, "cat /data/shared/file") == "kept\n"
            api.end(again)
    assert mounted(server) == []


def test_the_sdk_and_the_command_line_create_use_and_remove_volumes(server: Server) -> None:
    atoll = server.atoll
    assert atoll("volume", "create", "by-cli", "--size", "16Mi").stdout == "by-cli\n"
    with Atoll(server.url, api_key=server.key) as client:
        made = client.volumes.create("by-sdk", size="16Mi", kind="local")
        assert made == client.volumes.get("by-sdk")
        assert {"by-cli", "by-sdk"} <= {volume.id for volume in client.volumes.list()}
        mounts = [Mount("by-cli", "/data/a", read_only=False), Mount("by-sdk", "/data/b")]
        with client.session(volumes=mounts) as session:
            assert session.info.volumes == tuple(mounts)
            written = session.run("open('/data/a/file', 'w').write('text')")
            assert written.ok
            assert not session.run("open('/data/b/file', 'w')").ok
        for wrong in ("by-cli", "by-cli:data", "by-cli:/data/x:wo", ":/data/x"):
            assert atoll("session", "create", "--volume", wrong).returncode == 2
        created = atoll("session", "create", "--volume", "by-cli:/mnt/x:rw")
        session_id = created.stdout.strip()
        result = atoll("session", "exec", session_id, "--", "cat", "/mnt/x/file")
        assert result.stdout == "text"
        assert atoll("volume", "delete", "by-cli").returncode == 1
        atoll("session", "rm", session_id)
    eventually(lambda: atoll("volume", "delete", "by-cli", "by-sdk").returncode == 0)
    assert "by-" not in atoll("volume", "list").stdout


@pytest.mark.slow
def test_where_sizes_cannot_be_enforced_a_volume_is_read_only(bubblewrap: str) -> None:
    unprivileged.require()
    with unprivileged.directory() as home:
        (home / "data").mkdir()
        if unprivileged.ROOT:
            os.chown(home / "data", unprivileged.UID, unprivileged.UID)
        with unprivileged.UnprivilegedServer(home / "data") as server, calling(server) as api:
            make(api, "books")
            refused = api.http.post(f"{V1}/sessions", json={"volumes": [given("books")]})
            problem(refused, 422, "isolation_unavailable")
            place = home / "data" / "node" / "volumes" / "books" / "files"
            (place / "page").write_text("words")
            (place / "page").chmod(0o644)
            with session(api, given("books", read_only=True)) as one:
                assert sh(api, one, "cat /data/shared/page") == "words"
                assert api.run(one, command=["touch", "/data/shared/x"])["exit_code"] != 0
            problem(api.http.post(f"{V1}/volumes", json={"id": "x", "kind": "s3"}), 422,
                    "mount_unavailable")  # fmt: skip


def test_an_embedded_atoll_leaves_nothing_mounted(bubblewrap: str, tmp_path: Path) -> None:
    with Atoll(data_dir=tmp_path) as client:
        client.volumes.create("own", size="16Mi")
        session = client.sessions.create(volumes=[Mount("own", "/data/x", read_only=False)])
        assert session.run("open('/data/x/file', 'w').write('text')").ok
        assert str(tmp_path) in Path("/proc/self/mountinfo").read_text()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert list((tmp_path / "embedded").iterdir()) == []


def test_mounts_of_a_killed_embedded_atoll_are_not_deleted_through_the_mount(
    bubblewrap: str, tmp_path: Path
) -> None:
    code = (
        "import sys, time\nfrom atoll import Atoll, Mount\n"
        "client = Atoll(data_dir=sys.argv[1]).__enter__()\n"
        "client.volumes.create('own', size='16Mi')\n"
        "client.sessions.create(volumes=[Mount('own', '/data/x')])\n"
        "print('ready', flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
    found = [
        line.split()[4]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if str(tmp_path) in line and "/mounts/volume-" in line
    ]
    assert len(found) == 1
    held = os.open(found[0], os.O_DIRECTORY)  # As a bucket would keep what was in it.
    try:
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=held))
        with Atoll(data_dir=tmp_path) as client:
            client.sessions.create()
        assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
        assert os.listdir(held) == ["file"]
    finally:
        os.close(held)
