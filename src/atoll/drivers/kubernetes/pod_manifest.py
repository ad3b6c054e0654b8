"""
The pods that Atoll asks for, as JSON. Pure.

A pod satisfies the cluster's security profile "restricted" and goes further: every instance has a
uid of its own, no token of a service account, no name server, and a read-only root file system. The
image decides nothing of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atoll.drivers.kubernetes.labels import Label
from atoll.drivers.kubernetes.pod_state import CONTAINER
from atoll.drivers.shared import environment_variables, portable_interpreter
from atoll.drivers.shared.executor_bundle import BOOT
from atoll.drivers.shared.instance_paths import EXECUTOR, INSIDE

if TYPE_CHECKING:
    from atoll.model.resources import Resources
    from atoll.settings import KubernetesSettings

PORT = 7070
"""TCP port of executors."""
WORKSPACE = "/workspace"
TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - inside
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Of an image that sets none."""
DISK_MARGIN = 64 * 1024 * 1024
"""
Bytes beyond the limit of the workspace at which the kubelet evicts the pod. The executor ends code
that exceeds the limit before that.
"""
MEMORY_MARGIN = 48 * 1024 * 1024
"""Bytes for the executor, in addition to the memory of user code."""
LEND = f"{portable_interpreter.__name__}"
"""Module that writes the interpreter that is lent; a program of the interpreter image."""
LENT_SIZE = "512Mi"
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
"""Annotation without which an autoscaler keeps machines for pods that no controller replaces."""
UNREACHABLE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
WORKSPACE_VOLUME = "workspace"
MACHINE = "kubernetes.io/hostname"
ARCHITECTURE = "kubernetes.io/arch"


@dataclass(frozen=True)
class ImageFacts:
    """What was found out about an image by running a program in it (`image_probe`)."""

    reference: str
    """With the digest, if the registry gave one."""
    python: str = ""
    """The interpreter; empty if the image has none, and one is lent to it."""
    path: str = ""
    """The image's PATH."""
    volumes: tuple[str, ...] = ()
    """Paths that the image declares as volumes."""


@dataclass(frozen=True)
class PodRequest:
    name: str
    labels: dict[str, str]
    image: ImageFacts
    resources: Resources
    uid: int
    command: list[str]
    annotations: dict[str, str] = field(default_factory=dict)
    runtime_class: str = ""
    env: dict[str, str] = field(default_factory=dict)
    workspace: dict[str, Any] | None = None
    """
    The volume of the workspace; a directory of the pod if null, unless one of `mounts` is the
    workspace.
    """
    volumes: tuple[dict[str, Any], ...] = ()
    mounts: tuple[dict[str, Any], ...] = ()
    attached: bool = False
    """Whether its program waits for its standard input."""
    pull: str = "IfNotPresent"
    deadline: int | None = None
    """Seconds after which the cluster ends the pod, also without Atoll."""


def python_command(image: ImageFacts) -> list[str]:
    return [image.python] if image.python else list(portable_interpreter.command())


def executor_command(image: ImageFacts) -> list[str]:
    return [*python_command(image), "-I", "-S", "-B", "-c", BOOT.format(path=EXECUTOR), "-"]


def executor_env(image: ImageFacts) -> dict[str, str]:
    path, executable = image.path or PATH, image.python
    if not executable:
        path = f"{path}:{portable_interpreter.TARGET}/bin"
        executable = f"{portable_interpreter.TARGET}/bin/python3"
    return {
        **environment_variables.INSTANCE,
        "PATH": f"{path}:{INSIDE}/bin",
        "PYTHONPATH": f"{INSIDE}/lib",
        "ATOLL_PYTHON": executable,
    }


@dataclass(frozen=True)
class PodVolume:
    """A volume, where it is mounted, and what is noted about it; all of it may be missing."""

    volumes: tuple[dict[str, Any], ...] = ()
    mounts: tuple[dict[str, Any], ...] = ()
    annotations: dict[str, str] = field(default_factory=dict)


NO_VOLUME = PodVolume()


def executor_files(config_map: str, items: dict[str, str]) -> PodVolume:
    """Atoll's own files; `items` are paths by key of the config map."""
    volume = {
        "name": "executor",
        "configMap": {
            "name": config_map,
            "defaultMode": 0o555,
            "items": [{"key": key, "path": path} for key, path in items.items()],
        },
    }
    mounts = (
        {"name": "executor", "mountPath": EXECUTOR, "subPath": "executor.pyz", "readOnly": True},
        {"name": "executor", "mountPath": INSIDE, "subPath": "inside", "readOnly": True},
    )
    return PodVolume((volume,), mounts)


def limits(resources: Resources) -> dict[str, str]:
    """The limits that can be changed while the pod runs."""
    return {
        "cpu": f"{max(1, round(resources.cpu * 1000))}m",
        "memory": str(resources.memory + MEMORY_MARGIN),
    }


def requests(resources: Resources, settings: KubernetesSettings) -> dict[str, str]:
    return {
        "cpu": f"{max(1, round(resources.cpu * settings.cpu_request * 1000))}m",
        "memory": str(round((resources.memory + MEMORY_MARGIN) * settings.memory_request)),
    }


def pod(request: PodRequest, settings: KubernetesSettings) -> dict[str, Any]:
    resources = request.resources
    disk = str(resources.disk + DISK_MARGIN)
    lent = not request.image.python
    mounts = [*request.mounts, *_temporary_mounts(request)]
    volumes: list[dict[str, Any]] = [
        {
            "name": "temporary",
            "emptyDir": {"medium": "Memory", "sizeLimit": str(settings.tmp_size)},
        },
        *request.volumes,
    ]
    if all(mount["mountPath"] != WORKSPACE for mount in mounts):
        directory = {"name": WORKSPACE_VOLUME, "emptyDir": {"sizeLimit": disk}}
        volumes.append(request.workspace or directory)
        mounts.append({"name": WORKSPACE_VOLUME, "mountPath": WORKSPACE})
    if lent:
        volumes.append({"name": "python", "emptyDir": {"sizeLimit": LENT_SIZE}})
        mounts.append(
            {"name": "python", "mountPath": portable_interpreter.TARGET, "readOnly": True}
        )
    container = {
        "name": CONTAINER,
        "image": request.image.reference,
        "imagePullPolicy": request.pull,
        "command": request.command,
        "workingDir": WORKSPACE,
        "env": [{"name": name, "value": value} for name, value in request.env.items()],
        "stdin": request.attached,
        "stdinOnce": request.attached,
        "securityContext": _container_security(),
        "resources": {
            "limits": {**limits(resources), "ephemeral-storage": disk},
            "requests": {**requests(resources, settings), "ephemeral-storage": "16Mi"},
        },
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "sandbox",
        # No name is resolved inside: the default would name the cluster's server.
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "terminationGracePeriodSeconds": int(settings.termination_grace.total_seconds()),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": request.uid,
            "runAsGroup": request.uid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
        "tolerations": _tolerations(settings),
        "topologySpreadConstraints": [
            {
                "maxSkew": 5,
                "topologyKey": MACHINE,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {Label.NODE: request.labels[Label.NODE]}},
            }
        ],
    }
    if request.deadline is not None:
        spec["activeDeadlineSeconds"] = request.deadline
    if lent:
        spec["initContainers"] = [_lender(settings)]
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    if settings.priority_class:
        spec["priorityClassName"] = settings.priority_class
    if request.workspace is not None:
        # A volume belongs to root at first.
        spec["securityContext"]["fsGroup"] = request.uid
        spec["securityContext"]["fsGroupChangePolicy"] = "OnRootMismatch"
    if request.runtime_class:
        spec["runtimeClassName"] = request.runtime_class
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": request.name,
            "labels": request.labels,
            "annotations": {SAFE_TO_EVICT: "true", **request.annotations},
        },
        "spec": spec,
    }


def _container_security() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _temporary_mounts(request: PodRequest) -> list[dict[str, str]]:
    """
    Of the temporary directories, and of the paths that the image declares as volumes: there the
    container runtime would make directories whose size nothing limits.
    """
    taken = {mount["mountPath"] for mount in request.mounts} | {WORKSPACE}
    paths = [path for path in (*TEMPORARY, *request.image.volumes) if path not in taken]
    return [
        {"name": "temporary", "mountPath": path, "subPath": str(number)}
        for number, path in enumerate(dict.fromkeys(paths))
    ]


def _lender(settings: KubernetesSettings) -> dict[str, Any]:
    """Writes the interpreter of Atoll's own image into a directory of the pod."""
    return {
        "name": "interpreter",
        "image": settings.interpreter_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-m", LEND, portable_interpreter.TARGET],
        "securityContext": _container_security(),
        "resources": {
            "limits": {"cpu": "1", "memory": "256Mi"},
            "requests": {"cpu": "50m", "memory": "64Mi"},
        },
        "volumeMounts": [{"name": "python", "mountPath": portable_interpreter.TARGET}],
    }


def _tolerations(settings: KubernetesSettings) -> list[dict[str, Any]]:
    """The cluster would keep pods of a lost machine for five minutes."""
    seconds = int(settings.lost_after.total_seconds())
    return [
        *(dict(toleration) for toleration in settings.tolerations),
        *(
            {
                "key": taint,
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": seconds,
            }
            for taint in UNREACHABLE_TAINTS
        ),
    ]
