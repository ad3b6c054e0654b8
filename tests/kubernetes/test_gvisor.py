"""Sessions whose pods have gVisor's kernel, by a runtime class."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from tests.e2e.api import V1, Api, answer, eventually
from tests.kubernetes.sandboxes import LONG, Sandboxes, serving
from tests.servers.kubernetes.cluster import Cluster
from tests.servers.s3 import S3Server

GVISOR = "gvisor"
# The machine has a newer kernel, and another one in each version of gVisor reports this one.
KERNEL = "4.4.0"
RELEASE = "import os; print(os.uname().release)"
ENDLESS = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with open("pid", "w") as file:
    file.write(str(child.pid))
while True:
    time.sleep(1)
"""
LEFT = "import os; print(os.path.exists('/proc/' + open('pid').read()))"


@pytest.fixture(scope="module")
def sandboxes(
    runsc: str, cluster: Cluster, s3: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sandboxes]:
    """A server whose templates may name gVisor's runtime class; others have the default one."""
    namespace = cluster.namespace(f"gvisor-{secrets.token_hex(4)}")
    place = tmp_path_factory.mktemp("gvisor")
    own = {"ATOLL_KUBERNETES__RUNTIME_CLASSES": GVISOR}
    with serving(cluster, s3, place, namespace, **own) as server, server.client() as http:
        template = {"id": GVISOR, "name": GVISOR, "runtime": GVISOR}
        answer(http.post(f"{V1}/templates", json=template), 201)
        eventually(lambda: answer(http.get(f"{V1}/templates/{GVISOR}"))["status"] == "ready", LONG)
        yield Sandboxes(server, Api(http), cluster, namespace)
    cluster.delete_namespace(namespace)


@pytest.fixture
def session(sandboxes: Sandboxes) -> Iterator[str]:
    """In gVisor, with the file `kept`."""
    made = sandboxes.create(template_id=GVISOR)
    yield made
    sandboxes.api.end(made)


def test_a_template_names_the_runtime_class_of_its_pods(sandboxes: Sandboxes, session: str) -> None:
    assert sandboxes.pod(session)["spec"]["runtimeClassName"] == GVISOR
    assert sandboxes.api.run(session, RELEASE)["stdout"].strip() == KERNEL
    other = sandboxes.create()
    assert sandboxes.api.run(other, RELEASE)["stdout"].strip() == os.uname().release
    sandboxes.api.end(other)


def test_files_survive_stop_and_start(sandboxes: Sandboxes, session: str) -> None:
    before = sandboxes.instance(session)
    answer(sandboxes.api.http.post(f"{V1}/sessions/{session}/stop"))
    assert sandboxes.api.run(session, "print(open('kept').read())")["stdout"] == "kept\n"
    assert sandboxes.instance(session) != before


def test_a_timeout_ends_all_processes(sandboxes: Sandboxes, session: str) -> None:
    result = sandboxes.api.run(session, ENDLESS, timeout=2)
    assert result["cause"] == "timeout", result
    assert sandboxes.api.run(session, LEFT)["stdout"] == "False\n"


def test_a_pod_that_needs_too_much_memory_is_replaced(sandboxes: Sandboxes, session: str) -> None:
    """The machine's kernel ends that of gVisor, and with it all of the pod."""
    sandboxes.checkpoint(session)
    before = sandboxes.instance(session)
    result = sandboxes.api.run(session, "x = [bytearray(1 << 20) for _ in range(4000)]", wait=50)
    assert result["cause"] == "oom", result
    assert sandboxes.replaced(session, before)
