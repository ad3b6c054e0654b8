"""
Checks what a cluster can give its instances, by trying it. `atoll doctor --driver kubernetes`
prints the results.

Permissions are asked for one by one, pods are submitted as a dry run, and whether network policies
are enforced is measured with a pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.drivers.kubernetes import access, pod_manifest
from atoll.drivers.kubernetes.api import ApiClient
from atoll.drivers.kubernetes.errors import ApiError, translated
from atoll.drivers.kubernetes.image_probe import ImageProbe
from atoll.drivers.kubernetes.instance_pods import InstancePods
from atoll.drivers.kubernetes.labels import Label, selector
from atoll.drivers.kubernetes.network_policy import NetworkPolicies
from atoll.drivers.kubernetes.pod_manifest import ImageFacts, PodRequest
from atoll.drivers.kubernetes.pod_watch import PodWatch
from atoll.drivers.kubernetes.probe_pods import RESOURCES, ProbePods
from atoll.drivers.shared.checks import Check
from atoll.drivers.shared.uids import new_uid, uid_range
from atoll.errors import AtollError

if TYPE_CHECKING:
    from atoll.settings import KubernetesSettings, Settings


@dataclass(frozen=True)
class Permission:
    verb: str
    resource: str
    use: str
    subresource: str = ""
    group: str = ""
    essential: bool = True

    @property
    def name(self) -> str:
        subresource = f"/{self.subresource}" if self.subresource else ""
        return f"{self.verb} {self.resource}{subresource}"


PERMISSIONS = (
    *(
        Permission(verb, "pods", "an instance is a pod")
        for verb in ("get", "list", "watch", "create", "patch", "delete")
    ),
    Permission("get", "pods", "executors get their configuration over it", "attach"),
    Permission("create", "pods", "executors get their configuration over it", "attach"),
    Permission("patch", "pods", "limits of running instances", "resize", "", False),
    *(
        Permission(verb, "configmaps", "the executor, and what is known about images")
        for verb in ("get", "list", "create", "patch", "delete")
    ),
    *(
        Permission(verb, "networkpolicies", "instances without a network", "", "networking.k8s.io")
        for verb in ("create", "patch")
    ),
    Permission(
        "delete",
        "networkpolicies",
        "removal of what this check makes",
        "",
        "networking.k8s.io",
        False,
    ),
    Permission("list", "resourcequotas", "the size of the warm pool", "", "", False),
)
"""What Atoll may have to do in its namespace, and nothing else."""
FORWARD_PERMISSIONS = tuple(
    Permission(verb, "pods", "executors are reached through the API server", "portforward")
    for verb in ("get", "create")
)
"""In addition, if links are forwarded, as those of an Atoll outside the cluster."""
CLAIM_PERMISSIONS = tuple(
    Permission(verb, "persistentvolumeclaims", "the files of sessions")
    for verb in ("get", "list", "create", "patch", "delete")
)
"""In addition, if workspaces are claims."""


async def checks(settings: Settings) -> list[Check]:
    kubernetes = settings.kubernetes
    try:
        found = await asyncio.to_thread(access.find, kubernetes.kubeconfig, kubernetes.context)
    except AtollError as error:
        return [Check("cluster", False, error.message, essential=True)]
    namespace = kubernetes.namespace or found.namespace
    api = ApiClient(found, kubernetes)
    await api.open()
    try:
        forwarded = found.forwards(kubernetes.link)
        inspection = _Inspection(api, namespace, settings, forwarded=forwarded)
        with translated():
            version = await api.get("/version")
        result = [
            Check("cluster", True, f"{found.server}, Kubernetes {version['gitVersion']}"),
            Check("namespace", True, f"instances are pods of {namespace}"),
        ]
        result += await inspection.run()
    except AtollError as error:
        return [Check("cluster", False, error.message, essential=True)]
    finally:
        await api.close()
    stored = settings.blob.url is not None
    result.append(
        Check(
            "blob store",
            stored,
            "files of sessions are kept in it"
            if stored
            else "not set (ATOLL_BLOB__URL): files of a session would end with its pod",
            essential=True,
        )
    )
    return result


class _Inspection:
    def __init__(
        self, api: ApiClient, namespace: str, settings: Settings, *, forwarded: bool
    ) -> None:
        self._forwarded = forwarded
        self._api = api
        self._namespace = namespace
        self._settings: KubernetesSettings = settings.kubernetes
        self._uids = uid_range(settings.local)
        self._path = f"/api/v1/namespaces/{namespace}"
        # Not those of a server: what this leaves behind, a server must not take for its own.
        self._labels: dict[str, str] = {
            Label.CLUSTER: "doctor",
            Label.NODE: f"doctor-{secrets.token_hex(4)}",
        }

    async def run(self) -> list[Check]:
        result = await self._permissions()
        if any(check.essential and not check.ok for check in result):
            return result
        result.append(await self._security())
        result += [await self._runtime(name) for name in self._settings.runtime_classes]
        if self._settings.priority_class:
            result.append(await self._priority())
        result.append(await self._resize())
        result += await self._network()
        return result

    async def _permissions(self) -> list[Check]:
        needed = PERMISSIONS
        if self._forwarded:
            needed += FORWARD_PERMISSIONS
        if self._settings.workspaces == "claims":
            needed += CLAIM_PERMISSIONS
        refused = [one for one in needed if not await self._may(one)]
        essential = [one for one in refused if one.essential]
        result = [
            Check(
                "permissions",
                not essential,
                "the role allows everything that Atoll needs"
                if not essential
                else "missing: " + "; ".join(f"{one.name} ({one.use})" for one in essential),
                fix="" if not essential else "helm upgrade, or kubectl apply the Role of deploy/",
                essential=True,
            )
        ]
        result += [
            Check(f"permission: {one.name}", False, f"not granted; it is for {one.use}")
            for one in refused
            if not one.essential
        ]
        return result

    async def _may(self, permission: Permission) -> bool:
        with translated():
            return await self._api.may(
                self._namespace,
                permission.verb,
                permission.resource,
                subresource=permission.subresource,
                group=permission.group,
            )

    # Pods, as a dry run

    async def _refusal(self, **changes: Any) -> str | None:
        """Why the cluster does not accept an instance's pod; null if it does."""
        request = PodRequest(
            name=f"atoll-doctor-{secrets.token_hex(4)}",
            labels=self._labels,
            image=ImageFacts(self._settings.image, python="python3"),
            resources=RESOURCES,
            uid=new_uid(self._uids),
            command=["python3"],
            **changes,
        )
        with translated():
            try:
                await self._api.request(
                    "POST",
                    f"{self._path}/pods",
                    pod_manifest.pod(request, self._settings),
                    params={"dryRun": "All"},
                )
            except ApiError as error:
                if error.status >= 500:
                    raise
                return error.message
        return None

    async def _security(self) -> Check:
        refusal = await self._refusal(runtime_class=self._settings.runtime_class)
        return Check(
            "pods",
            refusal is None,
            refusal or "the cluster accepts the confined pods of instances",
            essential=True,
        )

    async def _runtime(self, name: str) -> Check:
        refusal = await self._refusal(runtime_class=name)
        return Check(
            f"runtime class: {name}",
            refusal is None,
            refusal or "templates can name it as their `runtime`",
        )

    async def _priority(self) -> Check:
        refusal = await self._refusal()
        return Check("priority class", refusal is None, refusal or self._settings.priority_class)

    async def _resize(self) -> Check:
        with translated():
            found = await self._api.get("/api/v1")
        possible = any(item["name"] == "pods/resize" for item in found["resources"])
        return Check(
            "resize in place",
            possible,
            "limits of running instances can be changed"
            if possible
            else "other limits take a new instance (Kubernetes 1.33 changes them in place)",
        )

    # The network, with pods

    async def _network(self) -> list[Check]:
        watch = PodWatch(self._api, f"{self._path}/pods", selector(self._labels))
        pods = InstancePods(self._api, f"{self._path}/pods", watch)
        probes = ProbePods(pods, watch, self._settings, self._labels, self._uids)
        policies = NetworkPolicies(self._api, self._namespace, probes, self._labels, None)
        probe = ImageProbe(probes, self._settings)
        try:
            with translated():
                await watch.open()
            image = await probe.run(
                self._settings.image, "", self._settings.runtime_class,
                pull="IfNotPresent", report=lambda text: None,
            )  # fmt: skip
            pulled = Check("image", True, f"{image.reference}, Python is {image.python or 'lent'}")
            await policies.open()
            enforced = await policies.ensure_measured(lambda: _done(image))
        except AtollError as error:
            return [Check("image and network", False, error.message, essential=True)]
        finally:
            await watch.close()
            with contextlib.suppress(AtollError):
                await policies.remove()
        return [
            pulled,
            Check(
                "network policies",
                enforced,
                "instances have no network"
                if enforced
                else "the cluster does not enforce them: user code reaches what pods reach",
                essential=not self._settings.open_network,
                requirement="no_network",
            ),
        ]


async def _done(image: ImageFacts) -> ImageFacts:
    return image
