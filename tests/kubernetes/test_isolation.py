"""User code in a pod can do nothing to its executor, and nothing outside."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from atoll.drivers.kubernetes import credentials
from atoll.drivers.kubernetes.driver import KubernetesDriver
from atoll.drivers.kubernetes.pod_manifest import PORT
from atoll.errors import AtollError, InvalidRequest, PermanentError
from atoll.link.errors import LinkLost
from atoll.model.template import Template
from atoll.protocol import frames
from atoll.settings import KubernetesSettings, LinkSettings, LocalSettings
from tests.contract.drivers.conftest import (
    LINK,
    ON_CLUSTER,
    on,
    opened,
    printed,
    spec,
    started,
    template,
)
from tests.e2e.api import until
from tests.kubernetes import hostile_images
from tests.kubernetes.nodes import ClusterNode
from tests.kubernetes.sandboxes import Sandboxes
from tests.servers.kubernetes.cluster import Cluster
from tests.servers.kubernetes.images import BARE, PYTHON

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def shared(sandboxes: Sandboxes) -> Iterator[str]:
    """A session for cases that leave nothing behind."""
    made = sandboxes.create()
    yield made
    sandboxes.api.end(made)


def found_inside(sandboxes: Sandboxes, session: str, code: str) -> Any:
    """What code prints as JSON."""
    result = sandboxes.api.run(session, f"import json\n{code}\nprint(json.dumps(found))")
    assert result["exit_code"] == 0, result
    return json.loads(result["stdout"])


# The process


def test_user_code_has_no_privileges(sandboxes: Sandboxes, shared: str) -> None:
    code = """
import os
found = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
found = {name: text.strip() for name, text in found.items()}
found["uids"] = os.getresuid()
"""
    found = found_inside(sandboxes, shared, code)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(found[name], 16) == 0, name
    assert found["NoNewPrivs"] == "1"
    assert found["Seccomp"] == "2"
    # The runtime's filter, and that of the executor.
    assert int(found["Seccomp_filters"]) >= 2
    assert min(found["uids"]) >= 1000


ATTEMPTS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)
attempts = {
    "become root": lambda: os.setuid(0),
    "change groups": lambda: os.setgroups([0]),
    "make a user namespace": lambda: call("unshare", 0x10000000),
    "mount": lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
    "trace PID 1": lambda: call("ptrace", 16, 1, 0, 0),
    "write to the image": lambda: open("/usr/local/bin/x", "w"),
    "change its users": lambda: open("/etc/passwd", "a"),
    "make a device": lambda: os.mknod("/tmp/disk", 0o600 | 0o060000, os.makedev(8, 0)),
    "raise its own limits": lambda: open("/sys/fs/cgroup/memory/memory.limit_in_bytes", "w"),
    "change the kernel": lambda: open("/proc/sys/kernel/core_pattern", "w"),
    "read the memory of PID 1": lambda: open("/proc/1/mem", "rb"),
    "read its environment": lambda: open("/proc/1/environ", "rb").read(),
    "list its descriptors": lambda: os.listdir("/proc/1/fd"),
    "read its mappings": lambda: open("/proc/1/maps").read(),
    "change its limits": lambda: call("prlimit64", 1, 7, ctypes.c_buffer(16), None),
}
found = []
for name, attempt in attempts.items():
    try:
        attempt()
        found.append(name)
    except OSError:
        pass
"""


def test_the_kernel_refuses_what_would_lead_out(sandboxes: Sandboxes, shared: str) -> None:
    assert found_inside(sandboxes, shared, ATTEMPTS) == []


def test_nothing_of_the_cluster_is_visible(sandboxes: Sandboxes, shared: str) -> None:
    code = """
import os
token = "/var/run/secrets/kubernetes.io"
found = {
    "token": os.path.exists(token) or os.path.exists("/run/secrets/kubernetes.io"),
    "variables": [name for name in os.environ if "KUBERNETES" in name],
    "resolver": open("/etc/resolv.conf").read(),
}
"""
    found = found_inside(sandboxes, shared, code)
    assert not found["token"]
    assert found["variables"] == []
    assert "127.0.0.1" in found["resolver"]


def test_each_pod_has_a_user_of_its_own(sandboxes: Sandboxes, shared: str) -> None:
    other = sandboxes.create()
    one, two = (
        found_inside(sandboxes, session, "import os\nfound = os.getuid()")
        for session in (shared, other)
    )
    assert one != two
    sandboxes.api.end(other)


def test_the_executor_ignores_signals_from_inside(sandboxes: Sandboxes, shared: str) -> None:
    before = sandboxes.instance(shared)
    code = """
import os, signal
found = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1):
    try:
        os.kill(1, number)
    except OSError as error:
        found.append(number)
"""
    found_inside(sandboxes, shared, code)
    assert sandboxes.api.run(shared, "print(1)")["stdout"] == "1\n"
    assert sandboxes.instance(shared) == before


# The link

SPEAK = """
import gc, json, socket, ssl, struct, sys
def configs():
    for one in gc.get_objects():
        if isinstance(one, dict) and "token_digest" in one:
            yield one
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
known = [config["token_digest"] for config in configs()]
keys = [bytes(one) for one in gc.get_objects() if isinstance(one, (bytes, bytearray))]
found = {"digests": len(known), "keys": sum(b"PRIVATE KEY" in key for key in keys), "answers": []}
own = socket.gethostbyname(socket.gethostname())
for source, target in [("", "127.0.0.1"), ("127.0.0.9", "127.0.0.1"), ("", own), (own, own)]:
    for token in [None, "", "0" * 64, *known]:
        raw = socket.create_connection((target, 7070), 10, (source, 0))
        try:
            with context.wrap_socket(raw) as link:
                body = json.dumps({"versions": [1, 2, 3, 4], "token": token}).encode()
                link.sendall(struct.pack("!IIB", len(body), 0, HELLO) + body)
                found["answers"].append(link.recv(65536)[9:].decode())
        except OSError:
            found["answers"].append("closed")
"""


def test_user_code_cannot_speak_to_its_executor(sandboxes: Sandboxes, shared: str) -> None:
    found = found_inside(sandboxes, shared, SPEAK.replace("HELLO", str(frames.HELLO)))
    # The digest of the token is all that is in the memory of the zygote, if anything is.
    assert found["keys"] == 0
    assert len(found["answers"]) >= 12
    assert set(found["answers"]) == {"closed"}


@on("forwarded")
async def test_user_code_cannot_speak_to_an_executor_that_admits_it(node: ClusterNode) -> None:
    """The API server forwards connections to an address that user code can connect from, too."""
    _, link = await started(node.driver, spec())
    code = f"import json\n{SPEAK.replace('HELLO', str(frames.HELLO))}\nprint(json.dumps(found))"
    found = json.loads(await printed(node.driver, link, code))
    assert found["keys"] == 0
    assert len(found["answers"]) >= 12
    codes = {json.loads(answer)["code"] for answer in found["answers"] if answer != "closed"}
    assert codes == {"unauthenticated"}


IDLE = """
import socket, time
kept = [socket.create_connection(("127.0.0.1", 7070), 10) for _ in range(100)]
open("open", "w").close()
while True: time.sleep(1)
"""


@on(*ON_CLUSTER)
async def test_idle_connections_from_inside_do_not_keep_the_control_plane_out(
    node: ClusterNode,
) -> None:
    handle, link = await started(node.driver, spec())
    running = asyncio.create_task(printed(node.driver, link, IDLE))
    try:
        await printed(node.driver, link, until("open"))
        second = await node.driver.connect(handle)
        assert await printed(node.driver, second, "print('in')") == "in"
        link.close()
        third = await node.driver.connect(handle)
        assert await printed(node.driver, third, "print('again')") == "again"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_impostor_with_another_certificate_is_refused(node: ClusterNode) -> None:
    handle = await node.driver.ensure(spec())
    other = credentials.make_key_pair(handle.instance_id)
    changed = replace(handle, data={**handle.data, "certificate": other.fingerprint})
    with pytest.raises(LinkLost, match="certificate"):
        await node.driver.connect(changed)
    link = await node.driver.connect(handle)
    assert await printed(node.driver, link, "print(1)") == "1"


# Objects of the cluster


async def test_no_object_in_the_cluster_contains_a_secret(
    node: ClusterNode, cluster: Cluster, instances_namespace: str
) -> None:
    handle, link = await started(node.driver, spec())
    token = credentials.token("of-all-replicas", handle.instance_id)
    core = f"/api/v1/namespaces/{instances_namespace}"
    texts = [
        json.dumps(cluster.ask("GET", f"{core}/{kind}"))
        for kind in ("pods", "configmaps", "secrets", "events")
    ]
    for text in texts:
        for secret in (token, credentials.digest(token), "of-all-replicas", "PRIVATE KEY"):
            assert secret not in text
    link.close()


async def test_the_network_policy_denies_everything_but_the_control_plane(
    node: ClusterNode, cluster: Cluster, instances_namespace: str
) -> None:
    path = f"/apis/networking.k8s.io/v1/namespaces/{instances_namespace}/networkpolicies"
    (policy,) = cluster.ask("GET", path)["items"]
    assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    assert not policy["spec"].get("egress")
    for rule in policy["spec"].get("ingress", ()):
        assert rule["ports"] == [{"protocol": "TCP", "port": PORT}]
        assert all(peer["podSelector"]["matchLabels"] for peer in rule["from"])
    handle = await node.driver.ensure(spec())
    pod = cluster.pod(instances_namespace, str(handle.data["pod"]))
    assert pod is not None
    selected = policy["spec"]["podSelector"]["matchLabels"]
    assert selected.items() <= pod["metadata"]["labels"].items()


def driver_of(
    cluster: Cluster, namespace: str, link: LinkSettings = LINK, **own: Any
) -> KubernetesDriver:
    settings = KubernetesSettings(
        kubeconfig=cluster.kubeconfig, namespace=namespace, image=PYTHON, link="direct", **own
    )
    return KubernetesDriver(settings, link, LocalSettings(), cluster="isolation", secret="s")


async def build(driver: KubernetesDriver, made: Template) -> None:
    await driver.images.build(made, timeout=timedelta(seconds=60), on_output=lambda text: None)


async def test_a_cluster_that_does_not_enforce_network_policies_gets_no_instances(
    cluster: Cluster, instances_namespace: str
) -> None:
    async with opened(driver_of(cluster, instances_namespace, node="closed")) as driver:
        await build(driver, template())
        with pytest.raises(InvalidRequest) as refused:
            await driver.ensure(spec())
        assert refused.value.code == "isolation_unavailable"


# Images

HOSTILE: dict[str, Any] = {"node": "hostile", "open_network": True}


@pytest.fixture(scope="module")
def hostile(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> None:
    for archive in hostile_images.make(tmp_path_factory.mktemp("hostile")):
        cluster.import_image(archive)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("flood", "instance_failed"),
        ("silent", "instance_not_started"),
        ("liar", "instance_not_started"),
        ("leaver", "instance_failed"),
    ],
)
async def test_a_fake_interpreter_ends_the_start_with_an_error(
    cluster: Cluster, instances_namespace: str, hostile: None, name: str, code: str
) -> None:
    link = LinkSettings(start_timeout=timedelta(seconds=3), connect_timeout=timedelta(seconds=3))
    made = template(image=hostile_images.reference(name))
    made_driver = driver_of(cluster, instances_namespace, link, **HOSTILE)
    async with opened(made_driver) as driver:
        await build(driver, made)
        with pytest.raises(AtollError) as failed:
            await started(driver, spec(template=made))
        assert failed.value.code == code, failed.value
        # It concerns this image alone.
        assert (await driver.status()).problem is None


async def test_an_image_does_not_decide_how_it_is_run(
    cluster: Cluster, instances_namespace: str, hostile: None
) -> None:
    made = template(image=hostile_images.reference("wilful"))
    async with opened(driver_of(cluster, instances_namespace, **HOSTILE)) as driver:
        await build(driver, made)
        _, link = await started(driver, spec(template=made))
        code = "import os; print(os.getuid() > 0, os.getcwd())"
        assert await printed(driver, link, code) == "True /workspace"
        # Memory of the instance, and not a directory of the machine.
        code = "import shutil; print(shutil.disk_usage('/data').total)"
        assert int(await printed(driver, link, code)) <= 64 * 2**20


async def test_an_image_without_python_is_refused(
    cluster: Cluster, instances_namespace: str
) -> None:
    async with opened(driver_of(cluster, instances_namespace, **HOSTILE)) as driver:
        with pytest.raises(PermanentError) as refused:
            await build(driver, template(image=BARE))
        assert refused.value.code == "interpreter_missing"
