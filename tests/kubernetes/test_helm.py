"""The chart and the manifests made of it, without a cluster."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.api.rest.health import router
from atoll.api.rest.server.uvicorn_server import check_exposure
from atoll.drivers.kubernetes.cluster_checks import (
    CLAIM_PERMISSIONS,
    FORWARD_PERMISSIONS,
    PERMISSIONS,
)
from atoll.settings import Settings
from tests.servers.kubernetes.helm import CHART, MANIFESTS, Helm

MARGIN = 30
"""Seconds between the last wait of a replica that ends and the end of its pod."""

Values = dict[str, Any]
SMALL: Values = {
    "secrets": {
        "databaseUrl": "postgresql://atoll:secret@db.example.com/atoll",
        "redisUrl": "redis://:secret@redis.example.com:6379/0",
        "apiKey": "0123456789abcdef",
        "secretsKey": "00" * 32,
    },
    "blobs": {"url": "s3://atoll"},
    "tls": {"insecure": True},
}
LARGE: Values = {
    "fullnameOverride": "sandboxes",
    "nameOverride": "sandboxes",
    "replicas": 3,
    "image": {"repository": "registry.example.com/atoll", "digest": "sha256:" + "0" * 64},
    "existingSecret": "given",
    "blobs": {"url": "s3://atoll/x", "endpoint": "https://s3.example.com", "region": "eu-1"},
    "tls": {"secretName": "certificate"},
    "settings": {
        "ATOLL_BLOB__SPOOL_SIZE": 5_000_000_000,
        "ATOLL_POOL__MEMORY_SHARE": 0.5,
        "ATOLL_SESSION__TIMEOUT": 3600,
        "ATOLL_EVENT__WEBHOOK_PRIVATE": True,
    },
    "instances": {
        "namespace": "instances",
        "createNamespace": True,
        "node": "east",
        "imagePullSecrets": ["a", "b"],
        "runtimeClass": "gvisor",
        "runtimeClasses": ["kata"],
        "priorityClassName": "low",
        "nodeSelector": {"pool": "instances"},
        "tolerations": [{"key": "a", "operator": "Exists", "tolerationSeconds": 10}],
        "workspaces": "claims",
        "storageClass": "fast",
        "link": "forward",
    },
    "ingress": {"enabled": True, "host": "atoll.example.com", "tlsSecretName": "public"},
    "networkPolicy": {"enabled": True, "from": [{"podSelector": {}}], "egress": [{}]},
    "serviceMonitor": {"enabled": True, "tlsConfig": {"serverName": "atoll"}},
    "podAnnotations": {"a": "b"},
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
}
SETS = pytest.mark.parametrize("values", [SMALL, LARGE], ids=["small", "large"])


def merged(values: Values, change: Values) -> Values:
    result = dict(values)
    for name, value in change.items():
        nested = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if nested else value
    return result


class Chart:
    def __init__(self, helm: Helm, directory: Path) -> None:
        self._helm = helm
        self._values = directory / "values.yaml"

    def render(self, values: Values) -> dict[tuple[str, str], dict[str, Any]]:
        """By kind and name."""
        self._write(values)
        found = self._helm.render(self._values)
        return {(one["kind"], one["metadata"]["name"]): one for one in found}

    def lint(self, values: Values) -> None:
        self._write(values)
        self._helm.run("lint", str(CHART), "--strict", "--values", str(self._values))

    def _write(self, values: Values) -> None:
        # JSON is YAML.
        self._values.write_text(json.dumps(values))


@pytest.fixture
def chart(helm: Helm, tmp_path: Path) -> Chart:
    return Chart(helm, tmp_path)


@SETS
def test_the_chart_has_no_lint(chart: Chart, values: Values) -> None:
    chart.lint(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replica": 3}, "additional properties 'replica' not allowed"),
        ({"instances": {"image": ""}}, "/instances/image"),
        ({"settings": {"POOL_SIZE": 1}}, "invalid propertyName 'POOL_SIZE'"),
        ({"secrets": {"apiKey": "short"}}, "/secrets/apiKey"),
        ({"secrets": {"redisUrl": ""}}, "secrets.redisUrl: needed"),
        ({"existingSecret": "given"}, "existingSecret is set"),
        ({"blobs": {"url": ""}}, "blobs.url: needed"),
        ({"tls": {"insecure": False}}, "tls: set tls.secretName"),
        ({"tls": {"secretName": "given"}}, "not both"),
        ({"instances": {"createNamespace": True}}, "instances.createNamespace: set"),
        ({"ingress": {"enabled": True}}, "ingress.host: needed"),
    ],
)
def test_values_that_cannot_work_are_refused(chart: Chart, change: Values, message: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        chart.render(merged(SMALL, change))
    assert message in "".join(refused.value.__notes__)


def test_the_schema_has_exactly_the_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    compare(schema, yaml.safe_load((CHART / "values.yaml").read_text()), "values")


def compare(schema: dict[str, Any], values: Values, path: str) -> None:
    """A value that is an object of this chart has its keys in the schema, and no others."""
    known = set(schema["properties"]) - {"global"}
    assert schema["additionalProperties"] is False, path
    assert known >= set(values), path
    for name in known:
        inner = schema["properties"][name]
        if "properties" in inner and name != "resources":
            assert set(inner["properties"]) == set(values[name]), f"{path}.{name}"
            compare(inner, values[name], f"{path}.{name}")


@SETS
def test_atoll_accepts_the_settings(
    chart: Chart, values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = chart.render(values)
    name = values.get("fullnameOverride", "atoll")
    pod = found["Deployment", name]["spec"]["template"]
    container = pod["spec"]["containers"][0]
    for variable in os.environ:
        if variable.startswith("ATOLL_"):
            monkeypatch.delenv(variable)
    for item in container["env"]:
        monkeypatch.setenv(item["name"], item["value"])
    secret = container["envFrom"][0]["secretRef"]["name"]
    if not values.get("existingSecret"):
        for variable, content in found["Secret", secret]["data"].items():
            monkeypatch.setenv(variable, base64.b64decode(content).decode())
    settings = Settings.read()

    check_exposure(settings)
    # Otherwise the network policy of instances keeps the replicas out.
    assert settings.kubernetes.control_plane.items() <= pod["metadata"]["labels"].items()
    assert settings.port == container["ports"][0]["containerPort"]
    probed = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness")}
    assert probed <= {getattr(route, "path", "") for route in router.routes}
    writable = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(str(settings.data_dir).startswith(f"{path}/") for path in writable)
    waits = 2 * settings.shutdown_timeout.total_seconds() + MARGIN
    assert pod["spec"]["terminationGracePeriodSeconds"] >= waits
    if values is SMALL:
        assert settings.redis_url == SMALL["secrets"]["redisUrl"]
        return
    assert secret == "given"
    assert settings.blob.spool_size == 5_000_000_000
    assert settings.public_url == "https://atoll.example.com"
    assert settings.kubernetes.runtime_classes == ("kata",)
    assert settings.kubernetes.image_pull_secrets == ("a", "b")
    assert settings.kubernetes.tolerations == LARGE["instances"]["tolerations"]
    rule = found["NetworkPolicy", name]["spec"]
    assert rule["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    monitor = found["ServiceMonitor", name]["spec"]
    service = found["Service", name]["metadata"]
    assert monitor["selector"]["matchLabels"].items() <= service["labels"].items()


@SETS
def test_the_role_has_the_permissions_that_doctor_checks(chart: Chart, values: Values) -> None:
    name = values.get("fullnameOverride", "atoll")
    granted = {
        (verb, group, resource)
        for rule in chart.render(values)["Role", name]["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    needed = PERMISSIONS
    if values is LARGE:
        needed += FORWARD_PERMISSIONS + CLAIM_PERMISSIONS
    assert granted == {
        (one.verb, one.group, "/".join(filter(None, (one.resource, one.subresource))))
        for one in needed
    }


def test_the_manifests_are_those_of_the_chart(helm: Helm) -> None:
    """`make manifests` makes them."""
    done = subprocess.run(
        [MANIFESTS / "render"],
        env={**os.environ, "HELM": str(helm.program)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (MANIFESTS / "atoll.yaml").read_text() == done.stdout
