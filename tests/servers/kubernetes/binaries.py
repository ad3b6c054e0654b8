"""
Kubernetes, etcd and Helm, built from Go modules.

Started as a program, `python -m tests.servers.kubernetes.binaries`, it builds what is not cached.
That needs a network, which the tests of a cluster do not have: they only unpack, and `tests.run`
builds before (`background`).
"""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

from tests.servers.kubernetes.go_programs import BuildFailed, GoPrograms, linked

KUBERNETES_SOURCES, HELM_SOURCES = (Path(__file__).parent / name for name in ("go", "go_helm"))
HYPERKUBE = "hyperkube"
_VERSION_PACKAGES = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
# What a chart is rendered for when there is no cluster.
_CAPABILITIES = ("helm.sh/helm/v3/pkg/chartutil", "helm.sh/helm/v3/pkg/lint/rules")


def cached() -> bool:
    return all(programs.cached() for programs in (kubernetes(), helm()))


def build() -> None:
    for programs in (kubernetes(), helm()):
        programs.build()


def unpack(directory: Path) -> Path:
    """
    etcd, the components of Kubernetes and kubectl in one program, whose first argument is the
    component. Skips the test when it is not built.
    """
    return kubernetes().unpack(directory)[HYPERKUBE]


def version() -> str:
    """Of Kubernetes, such as v1.34.4."""
    return _version(KUBERNETES_SOURCES, "k8s.io/kubernetes")


def kubernetes() -> GoPrograms:
    """With what Kubernetes' own build sets: without a version a kubelet does not start."""
    major, minor, _ = version().removeprefix("v").split(".")
    facts = {
        "gitVersion": version(),
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
    }
    flags = linked({f"{path}.{key}": facts[key] for path in _VERSION_PACKAGES for key in facts})
    return GoPrograms("Kubernetes", KUBERNETES_SOURCES, {HYPERKUBE: "."}, flags)


def helm() -> GoPrograms:
    major, minor, _ = version().removeprefix("v").split(".")
    facts = {"k8sVersionMajor": major, "k8sVersionMinor": minor}
    variables = {f"{path}.{key}": facts[key] for path in _CAPABILITIES for key in facts}
    variables["helm.sh/helm/v3/internal/version.version"] = _version(
        HELM_SOURCES, "helm.sh/helm/v3"
    )
    packages = {"helm": "helm.sh/helm/v3/cmd/helm"}
    return GoPrograms("Helm", HELM_SOURCES, packages, linked(variables))


def _version(sources: Path, module: str) -> str:
    found = re.search(rf"\b{re.escape(module)} (v\S+)", (sources / "go.mod").read_text())
    assert found is not None
    return found[1]


def _terminate(number: int, frame: object) -> None:
    """End the compilers too, and remove the work directory."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.getpgrp() == os.getpid():
        with suppress(ProcessLookupError):
            os.killpg(0, signal.SIGTERM)
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    try:
        build()
    except BuildFailed as failed:
        sys.exit(str(failed))
