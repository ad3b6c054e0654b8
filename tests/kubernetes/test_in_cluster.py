"""Atoll as its chart installs it: replicas in the cluster, with the rights of their account."""

from __future__ import annotations

import json
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.api import V1, Api, answer, eventually
from tests.kubernetes.release import NAME, REPLICAS, Release
from tests.servers.kubernetes.atoll_image import make_atoll_image
from tests.servers.kubernetes.cluster import Cluster
from tests.servers.kubernetes.helm import MANIFESTS, Helm
from tests.servers.kubernetes.images import BARE

CLIENTS, QUEUED = 4, 3
APPEND = 'open("ran", "a").write({token!r} + "\\n")\nprint({token!r})'
RIGHTS = {
    "pods": {"get", "list", "watch", "create", "patch", "delete"},
    "pods/attach": {"get", "create"},
    "pods/resize": {"patch"},
    "configmaps": {"get", "list", "create", "patch", "delete"},
    "resourcequotas": {"list"},
    "networkpolicies.networking.k8s.io": {"create", "patch", "delete"},
}
# To apply an object counts as `patch`, and needs the right to create it too. Newer clusters need
# another verb for attach.
UNUSED = {("networkpolicies", "", "create"), ("pods", "attach", "create")}
EVERYBODY = frozenset({"selfsubjectreviews", "selfsubjectaccessreviews", "selfsubjectrulesreviews"})
"""What every account may create, to ask for its rights."""


@pytest.fixture(scope="module")
def release(
    cluster: Cluster, helm: Helm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Release]:
    directory = tmp_path_factory.mktemp("release")
    cluster.import_image(make_atoll_image(directory))
    found = Release(cluster, helm, directory)
    try:
        yield found.install()
    finally:
        found.close()


def test_a_session_is_served_by_every_replica(release: Release) -> None:
    pods = release.pods()
    assert len(pods) == REPLICAS
    assert len({pod["spec"]["nodeName"] for pod in pods}) == REPLICAS, "they prefer two machines"
    with release.api() as api:
        session = create(api)
        api.put(session, "seven.txt", b"7")
        for pod in pods:
            with release.client(pod["status"]["podIP"]) as http:
                assert Api(http).run(session, "print(open('seven.txt').read())")["stdout"] == "7\n"
        limits = {"resources": {"memory": "96Mi"}}
        answer(api.http.patch(f"{V1}/sessions/{session}", json=limits))
        answer(api.http.post(f"{V1}/sessions/{session}/stop"))
        assert api.run(session, "print(open('seven.txt').read())")["stdout"] == "7\n"
        api.end(session)


def test_an_image_without_python_gets_that_of_atoll(release: Release) -> None:
    with release.api() as api:
        template = {"id": "bare", "name": "bare", "image": BARE}
        answer(api.http.post(f"{V1}/templates", json=template), 201)
        eventually(lambda: answer(api.http.get(f"{V1}/templates/bare"))["status"] == "ready")
        session = create(api, template_id="bare")
        assert api.run(session, "import sys; print(sys.prefix)")["stdout"] == "/run/atoll/python\n"
        assert api.run(session, command=["busybox", "echo", "there"])["stdout"] == "there\n"
        api.end(session)


def test_the_doctor_finds_nothing_missing(release: Release) -> None:
    pod = release.pods()[0]["metadata"]["name"]
    doctor = ("atoll", "doctor", "--driver", "kubernetes", "--json")
    printed = release.cluster.kubectl("exec", "-n", release.namespace, pod, "--", *doctor)
    refused = {check["name"] for check in json.loads(printed) if not check["ok"]}
    # What this cluster lacks; the chart was installed with `openNetwork`.
    assert refused == {"network policies"}


def test_executions_survive_a_rolling_restart_and_an_upgrade(release: Release) -> None:
    """Every accepted execution gets its result, and each ran once."""
    outdated = plant_outdated_executor(release)
    before = {pod["metadata"]["name"] for pod in release.pods()}
    with ended_containers(release) as ended, load(release) as accepted:
        eventually(lambda: len(accepted) > CLIENTS * QUEUED)
        release.restart()
        between = {pod["metadata"]["name"] for pod in release.pods()}
        release.helm("upgrade", "--set", "podAnnotations.upgraded=yes")
        done = len(accepted)
        eventually(lambda: len(accepted) > done + CLIENTS * QUEUED)
        after = {pod["metadata"]["name"] for pod in release.pods()}
        eventually(lambda: set(ended) >= before | between)
    check_results(release, accepted)
    assert not before & between
    assert not between & after
    assert release.cluster.client.get(outdated).status_code == httpx.codes.NOT_FOUND
    assert set(ended.values()) == {0}, "one was killed, because it took too long"


def test_the_account_has_no_right_that_is_not_used(release: Release) -> None:
    namespace = release.instances
    granted = rights(release, namespace)
    assert granted == RIGHTS
    assert rights(release, release.namespace) == rights(release, "kube-system") == {}

    used = set()
    for event in release.cluster.requests_of(release.namespace, NAME):
        entity = event.get("objectRef", {})
        if entity.get("resource") in {None, *EVERYBODY}:
            continue
        decision = event["annotations"]["authorization.k8s.io/decision"]
        assert decision == "allow", f"{event['verb']} {entity}"
        assert entity["namespace"] == namespace
        used.add((*(entity.get(part, "") for part in ("resource", "subresource")), event["verb"]))
    may = {(*_parts(name), verb) for name, verbs in granted.items() for verb in verbs}
    assert may - used == UNUSED


def test_the_manifests_are_accepted_without_helm(cluster: Cluster) -> None:
    namespace = cluster.namespace("atoll")
    label = "pod-security.kubernetes.io/warn=restricted"
    cluster.kubectl("label", "namespace", namespace, label)
    cluster.kubectl(
        "apply", "--dry-run=server", "--warnings-as-errors", "-f", str(MANIFESTS / "atoll.yaml")
    )
    cluster.delete_namespace(namespace)


def create(api: Api, **fields: Any) -> str:
    """A session's id. One replica prepares a template; others answer 503 until that is done."""
    made: list[str] = []

    def is_made() -> bool:
        response = api.http.post(f"{V1}/sessions", json=fields)
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            assert response.json()["code"] == "template_not_here"
            return False
        made.append(answer(response, 201)["id"])
        return True

    eventually(is_made)
    return made[0]


def plant_outdated_executor(release: Release) -> str:
    """What another version of Atoll has left; its path in the API."""
    path = f"/api/v1/namespaces/{release.instances}/configmaps"
    (own,) = release.cluster.ask("GET", path, params={"labelSelector": "atoll.dev/shared"})["items"]
    metadata = {"name": "outdated", "labels": own["metadata"]["labels"]}
    release.cluster.ask("POST", path, json={"metadata": metadata})
    return f"{path}/outdated"


def rights(release: Release, namespace: str) -> dict[str, set[str]]:
    """What the replicas' account may do there: verbs by resource."""
    account = release.cluster.service_account_kubeconfig(release.namespace, NAME)
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    found = release.cluster.kubectl_as(
        account, "create", "--raw", path, "-f", "-", input=json.dumps(review)
    )
    verbs: dict[str, set[str]] = defaultdict(set)
    for rule in json.loads(found)["status"]["resourceRules"]:
        assert "resourceNames" not in rule
        for group in rule["apiGroups"]:
            for resource in set(rule["resources"]) - EVERYBODY:
                verbs[".".join(filter(None, (resource, group)))] |= set(rule["verbs"])
    return dict(verbs)


def _parts(name: str) -> tuple[str, str]:
    """Resource and subresource."""
    resource, _, subresource = name.partition(".")[0].partition("/")
    return resource, subresource


@contextmanager
def load(release: Release) -> Iterator[dict[str, str]]:
    """
    Clients with a session each, in which some executions are always queued. Yields the sessions of
    what was accepted, by execution.
    """
    accepted: dict[str, str] = {}
    stopped = threading.Event()
    with release.api() as api:
        sessions = [create(api) for _ in range(CLIENTS)]

    def client(session: str) -> None:
        while not stopped.is_set():
            for token in [secrets.token_hex(8) for _ in range(QUEUED)]:
                # A request without an answer may be repeated, because it has an id.
                body = {"code": APPEND.format(token=token), "execution_id": token}
                ask(release, "POST", f"sessions/{session}/execute", json=body)
                accepted[token] = session
            ask(release, "GET", f"executions/{token}/result?wait=30")

    with ThreadPoolExecutor(CLIENTS) as threads:
        running = [threads.submit(client, session) for session in sessions]
        try:
            yield accepted
        finally:
            stopped.set()
        for one in running:
            one.result()


def ask(release: Release, method: str, path: str, **content: Any) -> None:
    """As a client does that repeats a request until a replica answers it."""

    def is_answered() -> bool:
        try:
            with release.api() as api:
                response = api.http.request(method, f"{V1}/{path}", **content)
        except httpx.TransportError:
            return False
        refused = response.status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert refused or response.is_success, response.text
        return not refused

    eventually(is_answered)


def check_results(release: Release, accepted: dict[str, str]) -> None:
    ran: dict[str, set[str]] = defaultdict(set)
    with release.api() as api:
        for token, session in accepted.items():
            result = api.result(token)
            assert (result["status"], result["stdout"]) == ("success", f"{token}\n")
            ran[session].add(token)
        for session, tokens in ran.items():
            lines = api.http.get(f"{V1}/sessions/{session}/files/ran").text.split()
            assert sorted(lines) == sorted(tokens)
            api.end(session)


@contextmanager
def ended_containers(release: Release) -> Iterator[dict[str, int]]:
    """Exit codes of replicas that end meanwhile, by pod. The cluster forgets them soon."""
    ended: dict[str, int] = {}
    stopped = threading.Event()

    def watch() -> None:
        version = ""
        while not stopped.is_set():
            for pod in release.changes(version):
                version = pod["metadata"]["resourceVersion"]
                for status in pod["status"].get("containerStatuses", ()):
                    if "terminated" in status["state"]:
                        code = status["state"]["terminated"]["exitCode"]
                        ended[pod["metadata"]["name"]] = code

    with ThreadPoolExecutor(1) as threads:
        watching = threads.submit(watch)
        try:
            yield ended
        finally:
            stopped.set()
            watching.result()
