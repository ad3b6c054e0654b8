"""Workspaces and volumes that a CSI driver of the cluster mounts from the bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.drivers.kubernetes.bucket_volumes import MARKER
from tests.e2e.api import V1, Api, answer, eventually, problem
from tests.kubernetes.sandboxes import LONG, Sandboxes, serving
from tests.servers.kubernetes.bucket_driver import BucketDriver
from tests.servers.kubernetes.cluster import Cluster

MOUNTED = {"workspace_mode": "mount"}
SHARED = "/data/shared"


@pytest.fixture
def mounting(
    cluster: Cluster, namespace: str, bucket_volumes: BucketDriver, tmp_path: Path
) -> Iterator[Sandboxes]:
    claim = bucket_volumes.claim(namespace)
    own = {
        "ATOLL_KUBERNETES__BUCKET_CLAIM": claim,
        "ATOLL_SESSION__SWEEP": "0.5",
        "ATOLL_WORKSPACE__KEEP": "0",
    }
    with (
        serving(cluster, bucket_volumes.s3, tmp_path, namespace, **own) as server,
        server.client() as http,
    ):
        yield Sandboxes(server, Api(http), cluster, namespace)


def objects(driver: BucketDriver, prefix: str) -> dict[str, bytes]:
    """Files that the bucket has below a prefix."""
    store = driver.s3.store()
    found = [item["path"] for batch in store.list(prefix=prefix) for item in batch]
    return {
        path.removeprefix(f"{prefix}/"): bytes(store.get(path).bytes())
        for path in found
        if not path.endswith(("/", MARKER))
    }


def prints(sandboxes: Sandboxes, session: str, code: str) -> str:
    result = sandboxes.api.run(session, code, wait=LONG)
    assert result["exit_code"] == 0, result
    return str(result["stdout"]).strip()


def test_a_mounted_workspace_is_in_the_bucket_and_outlives_its_pods(
    mounting: Sandboxes, bucket_volumes: BucketDriver
) -> None:
    session = mounting.create(**MOUNTED)
    prefix = f"{mounting.namespace}/mounts/{session}"
    assert objects(bucket_volumes, prefix) == {"kept": b"kept"}

    before = mounting.instance(session)
    execution = mounting.start(session)
    mounting.evict(session)
    mounting.check_retried(session, execution)
    mounting.replaced(session, before)

    answer(mounting.api.http.post(f"{V1}/sessions/{session}/stop"))
    eventually(lambda: mounting.cluster.ask("GET", mounting.pods)["items"] == [], LONG)
    assert objects(bucket_volumes, prefix) == {"kept": b"kept", "runs": b"xx"}
    assert prints(mounting, session, "import os; print(*sorted(os.listdir()))") == ".tmp kept runs"
    assert "workspace_restored" not in {
        one["code"] for one in mounting.api.get(session)["warnings"]
    }

    mounting.api.end(session)
    eventually(lambda: objects(bucket_volumes, prefix) == {}, LONG)


def test_a_pod_has_the_directories_of_its_own_volumes_only(
    mounting: Sandboxes, bucket_volumes: BucketDriver
) -> None:
    http = mounting.api.http
    assert answer(http.post(f"{V1}/volumes", json={"id": "shared"}), 201)["kind"] == "s3"
    other = mounting.create(**MOUNTED)
    writer = mounting.create(volumes=[volume(read_only=False)], **MOUNTED)
    reader = mounting.create(volumes=[volume(read_only=True)])

    prints(mounting, writer, f"open('{SHARED}/a', 'w').write('for all')")
    assert prints(mounting, reader, f"print(open('{SHARED}/a').read())") == "for all"
    refused = mounting.api.run(reader, f"open('{SHARED}/b', 'w')")
    assert "Read-only file system" in refused["stderr"]
    look = f"""
import os
seen = [os.path.join(top, name) for top, _, names in os.walk("/", onerror=None) for name in names
        if not top.startswith(("/proc", "/sys"))]
print([path for path in seen if path.endswith("/kept")])
os.symlink("../../..", "{SHARED}/out")
print(os.path.samefile("{SHARED}/out", "/"))
print([line for line in open("/proc/mounts") if "passwd" in line or "secret" in line.lower()])
"""
    assert prints(mounting, writer, look).split("\n") == ["['/workspace/kept']", "True", "[]"]

    problem(http.delete(f"{V1}/volumes/shared"), 409, "volume_in_use")
    for session in (other, writer, reader):
        mounting.api.end(session)
    eventually(lambda: http.delete(f"{V1}/volumes/shared").status_code == 204, LONG)
    assert objects(bucket_volumes, f"{mounting.namespace}/volumes") == {}


def test_a_new_volume_has_no_files_of_an_earlier_one_of_its_name(mounting: Sandboxes) -> None:
    http = mounting.api.http
    for _ in range(2):
        answer(http.post(f"{V1}/volumes", json={"id": "shared"}), 201)
        session = mounting.create(volumes=[volume(read_only=False)])
        look = f"import os; print(os.listdir('{SHARED}')); open('{SHARED}/a', 'w').write('x')"
        assert prints(mounting, session, look) == "['.tmp']"
        mounting.api.end(session)
        # Until its pod has ended, it is in use.
        eventually(lambda: http.delete(f"{V1}/volumes/shared").is_success, LONG)


def volume(*, read_only: bool) -> dict[str, Any]:
    return {"volume_id": "shared", "path": SHARED, "read_only": read_only}


def test_a_volume_on_the_disk_of_a_node_is_refused(mounting: Sandboxes) -> None:
    refused = mounting.api.http.post(f"{V1}/volumes", json={"id": "x", "kind": "local"})
    assert "s3" in problem(refused, 422, "isolation_unavailable")["detail"]


def test_without_a_claim_nothing_is_mounted(sandboxes: Sandboxes) -> None:
    refused = sandboxes.api.http.post(f"{V1}/sessions", json=MOUNTED)
    detail = problem(refused, 422, "mount_unavailable")["detail"]
    assert "kubernetes.bucket_claim" in detail
