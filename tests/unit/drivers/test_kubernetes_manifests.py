"""The objects that Atoll asks a cluster for."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from atoll.drivers.kubernetes import labels, pod_manifest
from atoll.drivers.kubernetes.labels import Label
from atoll.drivers.kubernetes.network_policy import ControlPlanePods, policy
from atoll.drivers.kubernetes.pod_manifest import ImageFacts, PodRequest
from atoll.drivers.kubernetes.quantity import quantity
from atoll.errors import InvalidRequest
from atoll.model.resources import Resources
from atoll.settings import KubernetesSettings, Settings

MiB = 1024 * 1024
LABELS: dict[str, str] = {Label.NODE: "kubernetes", Label.CLUSTER: "clus_1"}
SETTINGS = KubernetesSettings(
    priority_class="low",
    node_selector={"pool": "sandboxes"},
    tolerations=[{"key": "sandboxes", "operator": "Exists"}],
    image_pull_secrets=("registry",),
    lost_after=timedelta(seconds=7),
    interpreter_image="atoll:1",
)


def pod(settings: KubernetesSettings = SETTINGS, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": "atoll-inst-1",
        "labels": LABELS,
        "image": ImageFacts("python:3", python="/usr/bin/python3", path="/usr/bin"),
        "resources": Resources(cpu=1.5, memory=512 * MiB, disk=1024 * MiB, max_processes=128),
        "uid": 1_900_000_001,
        "command": ["python3"],
        "runtime_class": "gvisor",
    }
    manifest = pod_manifest.pod(PodRequest(**(fields | changes)), settings)
    json.dumps(manifest)  # It is JSON.
    return manifest


def test_nothing_of_the_host_or_of_the_cluster_is_given_to_a_pod() -> None:
    spec = pod()["spec"]
    (container,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & spec.keys()
    assert spec["securityContext"]["runAsUser"] == 1_900_000_001
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"emptyDir", "configMap", "persistentVolumeClaim"}
    assert all("sizeLimit" in volume["emptyDir"] for volume in spec["volumes"])


def test_a_pod_has_the_limits_of_its_session_and_room_for_the_executor() -> None:
    resources = pod()["spec"]["containers"][0]["resources"]
    assert resources["limits"] == {
        "cpu": "1500m",
        "memory": str(512 * MiB + pod_manifest.MEMORY_MARGIN),
        "ephemeral-storage": str(1024 * MiB + pod_manifest.DISK_MARGIN),
    }
    assert resources["requests"]["cpu"] == "150m"
    requested = quantity(resources["requests"]["memory"])
    assert requested == pytest.approx((512 * MiB + pod_manifest.MEMORY_MARGIN) / 4, abs=1)


def test_a_pod_is_placed_as_the_settings_say() -> None:
    spec = pod()["spec"]
    assert spec["priorityClassName"] == "low"
    assert spec["runtimeClassName"] == "gvisor"
    assert spec["nodeSelector"] == {"pool": "sandboxes"}
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["tolerations"][0] == {"key": "sandboxes", "operator": "Exists"}
    # Otherwise a cluster keeps pods of a lost machine for five minutes.
    assert {item["tolerationSeconds"] for item in spec["tolerations"][1:]} == {7}


def test_volumes_that_an_image_declares_are_limited_by_the_temporary_directory() -> None:
    image = ImageFacts("python:3", python="/py", volumes=("/data", "/var/lib/db", "/tmp"))
    mounts = pod(image=image)["spec"]["containers"][0]["volumeMounts"]
    temporary = {item["mountPath"] for item in mounts if item["name"] == "temporary"}
    assert temporary == {"/tmp", "/var/tmp", "/dev/shm", "/data", "/var/lib/db"}
    paths = [item["subPath"] for item in mounts if item["name"] == "temporary"]
    assert len(set(paths)) == len(paths)


def test_an_image_without_python_is_lent_one() -> None:
    image = ImageFacts("busybox:1")
    spec = pod(image=image)["spec"]
    (lender,) = spec["initContainers"]
    assert lender["image"] == "atoll:1"
    (mount,) = [item for item in spec["containers"][0]["volumeMounts"] if item["name"] == "python"]
    assert mount["readOnly"] is True
    assert pod_manifest.executor_command(image)[0] == "/run/atoll/python/lib/ld.so"
    assert pod_manifest.executor_env(image)["PATH"].endswith(
        "/run/atoll/python/bin:/run/atoll/inside/bin"
    )


def test_files_of_a_claim_belong_to_the_user_of_the_pod() -> None:
    volume = {"name": "workspace", "persistentVolumeClaim": {"claimName": "c"}}
    spec = pod(workspace=volume)["spec"]
    assert volume in spec["volumes"]
    assert spec["securityContext"]["fsGroup"] == 1_900_000_001
    assert "fsGroup" not in pod()["spec"]["securityContext"]


def test_the_policy_denies_everything_but_the_control_plane() -> None:
    pods = ControlPlanePods({"app": "atoll"}, "atoll")
    found = policy("p", LABELS, pods)["spec"]
    assert found["podSelector"]["matchLabels"] == LABELS
    assert found["policyTypes"] == ["Ingress", "Egress"]
    assert found["egress"] == []
    (rule,) = found["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": pod_manifest.PORT}]
    assert rule["from"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "atoll"}},
            "podSelector": {"matchLabels": {"app": "atoll"}},
        }
    ]
    assert policy("p", LABELS, None)["spec"]["ingress"] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500m", 0.5), ("2", 2.0), ("128Mi", 128 * MiB), ("1G", 1e9), ("1e3", 1000.0), ("0", 0.0)],
)
def test_quantities_are_read(text: str, expected: float) -> None:
    assert quantity(text) == expected


@pytest.mark.parametrize("text", ["sess_0123", "a" * 63, "tmpl.x-1"])
def test_values_of_labels_stay_as_they_are(text: str) -> None:
    assert labels.value(text) == text


@pytest.mark.parametrize("text", ["", "-a", "a b", "a" * 64, "ä"])
def test_other_values_become_digests(text: str) -> None:
    found = labels.value(text)
    assert found != text
    assert labels.value(found) == found


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        pytest.param({}, "needs blob.url", id="no bucket"),
        pytest.param(
            {"blob": {"url": "s3://bucket"}, "database_url": "postgresql://host/atoll"},
            "needs redis_url",
            id="a shared database without Redis",
        ),
    ],
)
def test_settings_with_which_sessions_would_be_lost_are_refused(
    given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        Settings.read(driver="kubernetes", **given)
