"""
Instances as pods of a Kubernetes cluster.

The executor is the first process of a pod. It gets its configuration and its private key over the
API server and is reached over TCP with TLS from then on: to execute something takes no request to
the API server. The cluster is the record of what exists, and one watch shows how it changes. While
the API server does not answer, instances are observed as unknown, never as gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import structlog

from atoll import ids
from atoll.drivers.base import NodeStatus
from atoll.drivers.kubernetes import (
    access,
    credentials,
    executor_start,
    pod_manifest,
    pod_start,
    resizing,
)
from atoll.drivers.kubernetes.api import ApiClient, Priority
from atoll.drivers.kubernetes.bucket_volumes import BucketVolumes, is_mounting
from atoll.drivers.kubernetes.capabilities import find_capabilities
from atoll.drivers.kubernetes.cluster_load import ClusterLoad
from atoll.drivers.kubernetes.disruptions import PodDisruptions
from atoll.drivers.kubernetes.errors import ClusterUnavailable, translated
from atoll.drivers.kubernetes.executor_files import ExecutorFiles
from atoll.drivers.kubernetes.image_probe import ImageProbe
from atoll.drivers.kubernetes.images import KubernetesImages
from atoll.drivers.kubernetes.instance_links import InstanceLinks
from atoll.drivers.kubernetes.instance_pods import KIND, InstancePods, handle_of
from atoll.drivers.kubernetes.labels import Annotation, Label, selector, value
from atoll.drivers.kubernetes.limits import KubernetesLimits
from atoll.drivers.kubernetes.network_policy import ControlPlanePods, NetworkPolicies
from atoll.drivers.kubernetes.ownership import PodOwnership
from atoll.drivers.kubernetes.pod_manifest import NO_VOLUME, PORT, PodRequest
from atoll.drivers.kubernetes.pod_watch import PodWatch
from atoll.drivers.kubernetes.probe_pods import ProbePods
from atoll.drivers.kubernetes.resizing import KubernetesResizing
from atoll.drivers.kubernetes.workspaces import InstanceFiles, PodDirectories, VolumeClaims
from atoll.drivers.shared import seccomp
from atoll.drivers.shared.executor_config import RLIMITS, ExecutorConfig
from atoll.drivers.shared.executor_links import shut_down
from atoll.drivers.shared.requirements import check_requirements
from atoll.drivers.shared.uids import new_uid, uid_range
from atoll.errors import (
    AtollError,
    InstanceNotStarted,
    InvalidRequest,
)
from atoll.link.errors import LinkLost
from atoll.model.instance import Handle, InstanceSpec, Observation, State

if TYPE_CHECKING:
    from datetime import timedelta

    from atoll.drivers.kubernetes.bucket_volumes import BucketDirectory
    from atoll.drivers.kubernetes.credentials import KeyPair
    from atoll.drivers.kubernetes.pod_manifest import ImageFacts, PodVolume
    from atoll.drivers.kubernetes.pod_state import PodState
    from atoll.drivers.kubernetes.workspaces import KubernetesWorkspaces
    from atoll.link.client import Link
    from atoll.model.template import Template
    from atoll.settings import KubernetesSettings, LinkSettings, LocalSettings

SHUTDOWN_MARGIN = 9.0
"""Seconds of the termination grace in which the executor ends what runs and sends the results."""
START_PATIENCE = 30.0
"""Seconds in which an API server that does not answer is asked again, before a start fails."""
START_RETRY = 1.0
"""Seconds between two attempts."""
PATIENCE = 180.0
"""Seconds without the API server after which the node has a problem."""

log = structlog.get_logger(__name__)


class KubernetesDriver:
    kind = KIND
    packages = None
    pausing = None

    def __init__(
        self,
        settings: KubernetesSettings,
        link: LinkSettings,
        local: LocalSettings,
        *,
        cluster: str,
        secret: str,
        bucket: BucketDirectory | None = None,
    ) -> None:
        """`cluster` identifies the database; `secret` is shared by all replicas."""
        self._settings = settings
        self._link_settings = link
        self._uids = uid_range(local)
        self._secret = secret
        self._bucket = bucket
        self._labels: dict[str, str] = {
            Label.CLUSTER: value(cluster),
            Label.NODE: settings.node,
        }
        self._resources = contextlib.AsyncExitStack()
        self.capabilities = find_capabilities(settings)
        # Made by open(), which reads the kubeconfig.
        self.images: KubernetesImages
        self.workspaces: KubernetesWorkspaces
        self.volumes: BucketVolumes | None = None
        self.limits: KubernetesLimits
        self.resizing: KubernetesResizing | None = None
        self.disruptions: PodDisruptions
        self.ownership: PodOwnership
        self._pods: InstancePods
        self._watch: PodWatch
        self._links: InstanceLinks
        self._files: ExecutorFiles
        self._policies: NetworkPolicies
        self._load: ClusterLoad

    async def open(self) -> None:
        """Waits for an API server that does not answer at first, for `START_PATIENCE`."""
        deadline = time.monotonic() + START_PATIENCE
        while True:
            try:
                await self._open()
            except ClusterUnavailable as error:
                await self._resources.aclose()
                if time.monotonic() > deadline:
                    raise
                log.warning("cluster.not_opened", error=error.message)
                await asyncio.sleep(START_RETRY)
            else:
                return

    async def _open(self) -> None:
        settings = self._settings
        found = await asyncio.to_thread(access.find, settings.kubeconfig, settings.context)
        namespace = settings.namespace or found.namespace
        core = f"/api/v1/namespaces/{namespace}"
        self._api = ApiClient(found, settings)
        self._resources.push_async_callback(self._api.close)
        await self._api.open()
        self._watch = PodWatch(self._api, f"{core}/pods", selector(self._labels))
        self._resources.push_async_callback(self._watch.close)
        with translated():
            await self._watch.open()
        self._pods = InstancePods(self._api, f"{core}/pods", self._watch)
        self._files = ExecutorFiles(self._api, f"{core}/configmaps", self._labels)
        with translated():
            await self._files.open()
            await self._files.remove_unused(await self._watch.all())
        forwarded = found.forwards(settings.link)
        control_plane = ControlPlanePods(
            settings.control_plane,
            found.namespace if found.in_cluster else None,
            settings.control_plane_addresses,
        )
        probes = ProbePods(self._pods, self._watch, settings, self._labels, self._uids)
        await probes.remove_ended()
        self.images = KubernetesImages(
            self._api,
            f"{core}/configmaps",
            ImageProbe(probes, settings),
            settings,
            self._labels,
        )
        self._policies = NetworkPolicies(
            self._api, namespace, probes, self._labels, None if forwarded else control_plane
        )
        self._resources.push_async_callback(self._policies.close)
        await self._policies.open()
        self.workspaces = PodDirectories(self._uids)
        if settings.workspaces == "claims":
            claims = f"{core}/persistentvolumeclaims"
            self.workspaces = VolumeClaims(self._api, claims, settings, self._labels, self._uids)
        if settings.bucket_claim and self._bucket is not None:
            self.volumes = BucketVolumes(settings.bucket_claim, self._bucket, self._pods)
        self._load = ClusterLoad(self._api, core, self._watch, settings)
        with translated():
            await self._load.open()
        self._links = InstanceLinks(
            self._api, self._pods.path, self._secret, self._link_settings, forwarded=forwarded
        )
        self._resources.push_async_callback(self._links.close)
        self._watch.subscribe(self._links.pod_changed)
        self.limits = KubernetesLimits(self._pods)
        if await resizing.is_possible(self._api, namespace):
            self.resizing = KubernetesResizing(
                self._api, self._pods, self._watch, self._links, settings
            )
        self.disruptions = PodDisruptions(self._watch)
        self.ownership = PodOwnership(self._api, self._pods)
        log.info(
            "cluster.opened",
            server=found.server,
            namespace=namespace,
            node=settings.node,
            link="forward" if forwarded else "direct",
        )

    async def close(self) -> None:
        await self._resources.aclose()

    async def status(self) -> NodeStatus:
        # A node with a problem loses its sessions to other nodes. Those here go on without the API
        # server, so it is one only after a while; requests that need the server fail until then.
        problem = None
        if self._watch.failed_for > PATIENCE:
            problem = f"The Kubernetes API server does not answer: {self._watch.failure}"
        return NodeStatus(problem, self._load.metrics())

    # Templates

    async def check(self, template: Template) -> None:
        check_requirements(template, self.capabilities)
        self.images.check(template)

    # Making instances

    async def ensure(self, spec: InstanceSpec) -> Handle:
        found = await self._pods.by_id(spec.instance_id)
        if found is not None:
            handle = handle_of(found)
            if await self._is_ready(handle, found):
                return handle
            await self.destroy(handle)
        try:
            return await self._make(spec)
        except BaseException:
            await asyncio.shield(self._undo(spec))
            raise

    async def _is_ready(self, handle: Handle, pod: PodState) -> bool:
        """Whether its executor has received its configuration."""
        if not pod.running or pod.deleting:
            return False
        try:
            link = await self._links.connect(
                handle, pod, timeout=self._link_settings.connect_timeout
            )
        except LinkLost:
            return False
        link.close()
        await link.closed
        return True

    async def _make(self, spec: InstanceSpec) -> Handle:
        image = await self.images.find(spec.template)
        await self._check_network()
        key = await asyncio.to_thread(credentials.make_key_pair, spec.instance_id)
        with translated():
            await self._files.ensure()
        bucket = await self._bucket_volume(spec)
        files = await self._provide(spec)
        request = self._request(spec, image, files, bucket, key)
        # Clients wait for their sessions; the pool does not.
        priority = Priority.PATIENT if spec.session_id is None else Priority.URGENT
        manifest = pod_manifest.pod(request, self._settings)
        created = await self._apply(manifest, priority)
        pod = await pod_start.wait_until_running(
            self._watch, created, self._settings, spec.on_delay
        )
        timeout = self._link_settings.start_timeout.total_seconds()
        try:
            async with asyncio.timeout(timeout):
                with translated():
                    await executor_start.start(
                        self._api,
                        f"{self._pods.path}/{pod.name}",
                        spec.instance_id,
                        self._config(spec),
                        key,
                    )
        except TimeoutError:
            # Not a failure of the cluster: what is in the image may never answer.
            raise InstanceNotStarted(
                f"The executor of instance {spec.instance_id} was not ready within {timeout:g} s."
            ) from None
        return handle_of(pod)

    async def _provide(self, spec: InstanceSpec) -> InstanceFiles:
        if spec.prefix is None:
            return await self.workspaces.provide(spec)
        return InstanceFiles(spec.workspace or spec.instance_id, new_uid(self._uids))

    async def _bucket_volume(self, spec: InstanceSpec) -> PodVolume:
        if not spec.volumes and spec.prefix is None:
            return NO_VOLUME
        if self.volumes is None:
            raise InvalidRequest(
                f"Instance {spec.instance_id} needs directories of the bucket: "
                f"{self.capabilities.unavailable['volumes']}.",
                code="mount_unavailable",
            )
        return await self.volumes.of(spec)

    async def _apply(self, manifest: dict[str, Any], priority: Priority) -> PodState:
        """A cancelled call ends when the server has answered: then the pod can be removed."""
        applying = asyncio.ensure_future(self._pods.apply(manifest, priority=priority))
        try:
            return await asyncio.shield(applying)
        except asyncio.CancelledError:
            await asyncio.wait([applying])
            raise

    async def _check_network(self) -> None:
        # With the operator's image: one of a template could report what it likes.
        await self._policies.ensure()
        if self._settings.open_network or await self._policies.ensure_measured(self.images.own):
            return
        raise InvalidRequest(
            "This cluster does not enforce network policies, so user code could reach everything "
            "that pods can reach. Use a network that enforces them, such as Calico or Cilium, or "
            "set ATOLL_KUBERNETES__OPEN_NETWORK=true.",
            code="isolation_unavailable",
        )

    def _request(
        self,
        spec: InstanceSpec,
        image: ImageFacts,
        files: InstanceFiles,
        bucket: PodVolume,
        key: KeyPair,
    ) -> PodRequest:
        template = spec.template
        executor = pod_manifest.executor_files(self._files.name, self._files.items)
        return PodRequest(
            name=ids.cluster_object_name(spec.instance_id),
            labels={
                **self._labels,
                Label.INSTANCE: spec.instance_id,
                Label.TEMPLATE: value(template.id),
                **({} if spec.session_id is None else {Label.SESSION: value(spec.session_id)}),
            },
            annotations={
                Annotation.WORKSPACE: files.workspace,
                Annotation.CERTIFICATE: key.fingerprint,
                Annotation.DISK: str(spec.resources.disk),
                Annotation.EXECUTOR: self._files.name,
                **bucket.annotations,
            },
            image=image,
            resources=spec.resources,
            uid=files.uid,
            workspace=files.volume,
            command=pod_manifest.executor_command(image),
            env=pod_manifest.executor_env(image),
            runtime_class=template.runtime or self._settings.runtime_class,
            volumes=(*executor.volumes, *bucket.volumes),
            mounts=(*executor.mounts, *bucket.mounts),
            attached=True,
        )

    def _config(self, spec: InstanceSpec) -> ExecutorConfig:
        grace = self._settings.termination_grace.total_seconds()
        token = credentials.token(self._secret, spec.instance_id)
        return ExecutorConfig(
            listen=PORT,
            loopback=self._links.forwarded,
            tls=True,
            token_digest=credentials.digest(token),
            preload=spec.template.preload,
            packages="",
            ephemeral=False,
            unattended=self._link_settings.unattended_grace.total_seconds(),
            seccomp=seccomp.programs(),
            termination_grace=grace - SHUTDOWN_MARGIN,
            rlimits={**RLIMITS, "NOFILE": self._settings.open_files},
        )

    async def _undo(self, spec: InstanceSpec) -> None:
        instance_id = spec.instance_id
        try:
            found = await self._pods.by_id(instance_id)
            if found is not None:
                await self._pods.kill(found.name, found.uid)
            if spec.workspace is None:
                await self.workspaces.discard(instance_id)
        except AtollError as error:
            # Recovery calls `ensure` or `destroy`, which removes it.
            log.warning("instance.not_removed", instance_id=instance_id, error=error.message)

    # Existing instances

    async def observe(self, handle: Handle) -> Observation:
        try:
            return await self._pods.observe(handle)
        except AtollError as error:
            log.info("instance.not_observed", instance_id=handle.instance_id, error=error.message)
            return Observation(State.UNKNOWN)

    async def connect(self, handle: Handle) -> Link:
        try:
            pod = await self._pods.find_or_last_known(handle)
        except AtollError as error:
            raise LinkLost(
                f"Cannot reach instance {handle.instance_id}. {error.message}"
            ) from error
        if pod is None or not pod.running:
            raise LinkLost(f"Instance {handle.instance_id} does not run.")
        return await self._links.open(handle, pod, timeout=self._link_settings.connect_timeout)

    async def stop(self, handle: Handle, *, grace: timedelta) -> None:
        pod = await self._pods.find(handle)
        if pod is None or pod.ended:
            return
        if grace and pod.running:
            await shut_down(self.connect(handle), grace)
        await self.destroy(handle)

    async def destroy(self, handle: Handle) -> None:
        pod = await self._pods.by_id(handle.instance_id)
        if pod is None:
            return
        # Two instances must never have the same files; a directory ends with its pod.
        shared = self.workspaces.outlive_instances or is_mounting(pod)
        shared = shared and not pod.on_lost_machine
        await self._pods.kill(pod.name, pod.uid, confirmed=shared)
        with translated():
            async with asyncio.timeout(self._settings.timeout.total_seconds()):
                await self._watch.wait(pod.name, lambda now: now is None or now.uid != pod.uid)

    async def handles(self) -> list[Handle]:
        # A pod that is being made has no owner yet, and is not an orphan.
        limits = (self._settings.schedule_timeout, self._settings.image_pull_timeout)
        since = time.time() - sum(limit.total_seconds() for limit in limits)
        pods = [
            pod
            for pod in await self._pods.all()
            if pod.phase != "Pending" or pod.created_at < since
        ]
        return [handle_of(pod) for pod in sorted(pods, key=lambda pod: pod.instance_id)]
