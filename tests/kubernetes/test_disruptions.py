"""
What a cluster does to pods: sessions keep their ids and files, what was running is retried, and the
client gets the cluster's own reason.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from tests.e2e.api import V1, answer, eventually, problem
from tests.kubernetes.pods import first_process
from tests.kubernetes.sandboxes import LONG, Sandboxes

# Pods that the cluster ends


def test_an_evicted_session_continues_with_its_files(sandboxes: Sandboxes, session: str) -> None:
    before = sandboxes.instance(session)
    sandboxes.evict(session)
    assert "EvictionByEvictionAPI" in sandboxes.replaced(session, before)


def test_an_execution_is_retried_when_its_pod_is_evicted(
    sandboxes: Sandboxes, session: str
) -> None:
    before = sandboxes.instance(session)
    execution = sandboxes.start(session)
    sandboxes.evict(session)
    sandboxes.check_retried(session, execution)
    assert "EvictionByEvictionAPI" in sandboxes.replaced(session, before)
    (first, second) = sandboxes.api.execution(execution)["attempts"]
    assert first["container_id"] == before
    assert first["cause"] == "evicted"
    assert second["container_id"] != before


def test_a_drain_moves_sessions_to_other_machines(sandboxes: Sandboxes, session: str) -> None:
    idle = sandboxes.create()
    execution = sandboxes.start(session)
    machine = sandboxes.pod(session)["spec"]["nodeName"]
    options = ("--force", "--delete-emptydir-data", "--ignore-daemonsets")
    try:
        sandboxes.cluster.kubectl("drain", machine, *options, timeout=LONG)
        sandboxes.check_retried(session, execution)
        assert sandboxes.api.run(idle, "print(open('kept').read())")["stdout"] == "kept\n"
        for moved in (session, idle):
            assert sandboxes.pod(moved)["spec"]["nodeName"] != machine
    finally:
        sandboxes.cluster.kubectl("uncordon", machine)
    sandboxes.api.end(idle)


def test_a_drain_of_many_sessions_loses_no_file(sandboxes: Sandboxes) -> None:
    """All of them get the notice at the same time, and none waits until others have moved."""
    cluster, many = sandboxes.cluster, 12
    cluster.kubectl("cordon", "n1")
    try:
        sessions = [sandboxes.create() for _ in range(many)]
        for number, session in enumerate(sessions):
            sandboxes.api.put(session, "own", str(number).encode())
        cluster.kubectl("uncordon", "n1")
        options = ("--force", "--delete-emptydir-data", "--ignore-daemonsets")
        cluster.kubectl("drain", "n2", *options, timeout=LONG)
        for number, session in enumerate(sessions):
            output = sandboxes.api.run(session, "print(open('own').read())")["stdout"]
            assert output == f"{number}\n"
            assert sandboxes.pod(session)["spec"]["nodeName"] == "n1"
            sandboxes.api.end(session)
    finally:
        cluster.kubectl("uncordon", "n1", "n2")


def test_an_execution_is_retried_when_its_pod_is_deleted(
    sandboxes: Sandboxes, session: str
) -> None:
    before = sandboxes.instance(session)
    execution = sandboxes.start(session)
    name = sandboxes.pod(session)["metadata"]["name"]
    sandboxes.cluster.kubectl("delete", "pod", name, "-n", sandboxes.namespace, "--wait=false")
    sandboxes.check_retried(session, execution)
    assert "deleted" in sandboxes.replaced(session, before)


def test_a_killed_executor_is_replaced(sandboxes: Sandboxes, session: str) -> None:
    before = sandboxes.instance(session)
    execution = sandboxes.start(session)
    sandboxes.checkpoint(session)
    first = first_process(sandboxes.pod(session)["metadata"]["uid"])
    assert first is not None
    os.kill(first, signal.SIGKILL)
    sandboxes.check_retried(session, execution)
    assert sandboxes.instance(session) != before


# Limits


def test_code_that_needs_too_much_memory_fails_and_the_session_continues(
    sandboxes: Sandboxes, session: str
) -> None:
    result = sandboxes.api.run(session, "x = [bytearray(1 << 20) for _ in range(4000)]", wait=50)
    assert result["status"] != "success"
    assert result["cause"] == "oom", result
    assert sandboxes.api.run(session, "print(1)")["stdout"] == "1\n"


def test_code_that_needs_too_much_disk_fails_and_the_session_continues(
    sandboxes: Sandboxes, session: str
) -> None:
    code = (
        "import time\nfor n in range(40): open(f'f{n}', 'wb').write(bytes(1 << 20))\ntime.sleep(20)"
    )
    result = sandboxes.api.run(session, code, wait=50)
    assert result["cause"] == "disk", result
    assert sandboxes.api.run(session, "print(open('kept').read())")["stdout"] == "kept\n"


# Pods that do not start


def test_the_session_fails_with_the_reason_of_the_scheduler(sandboxes: Sandboxes) -> None:
    created = sandboxes.api.http.post(f"{V1}/sessions", json={"cpu": "64"})
    detail = problem(created, 507, "node_full")["detail"]
    assert "Insufficient" in detail, detail
    assert not sandboxes.cluster.ask("GET", sandboxes.pods)["items"]


def test_a_used_up_quota_is_reported_with_its_name(sandboxes: Sandboxes) -> None:
    quotas = f"/api/v1/namespaces/{sandboxes.namespace}/resourcequotas"
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "0"}}}
    sandboxes.cluster.ask("POST", quotas, json=quota)
    try:
        sandboxes.cluster.wait(
            lambda: bool(sandboxes.cluster.ask("GET", f"{quotas}/few").get("status")), "the quota"
        )
        refused = sandboxes.api.http.post(f"{V1}/sessions", json={})
        assert "few" in problem(refused, 507, "node_full")["detail"]
    finally:
        sandboxes.cluster.ask("DELETE", f"{quotas}/few")
    sandboxes.api.end(sandboxes.create())


def test_a_template_shows_why_its_image_cannot_be_pulled_and_is_built_again(
    sandboxes: Sandboxes,
) -> None:
    """No registry can be reached here, which may be different in a moment."""
    body = {"name": "absent", "image": "localhost/absent:1"}
    made = answer(sandboxes.api.http.post(f"{V1}/templates", json=body), 201)
    found: dict[str, Any] = {}

    def is_explained() -> bool:
        found.update(answer(sandboxes.api.http.get(f"{V1}/templates/{made['id']}")))
        return found["message"] is not None

    eventually(is_explained, LONG)
    assert found["status"] in ("pending", "building")
    assert sandboxes.api.http.delete(f"{V1}/templates/{made['id']}").status_code == 204
    for word in ("localhost/absent:1", "ImagePull"):
        assert word in str(found["message"]), found
