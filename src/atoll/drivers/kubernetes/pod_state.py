"""
What the cluster reports about a pod, and what it means for the instance in it.

Pure. Of a pod only what Atoll uses is kept, because a cluster may have thousands of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from atoll.drivers.kubernetes.labels import Label
from atoll.model.instance import Observation, State
from atoll.model.session import Cause

CONTAINER = "executor"
HANDSHAKE = frozenset({"key", "ready"})
"""Lines that an executor writes when it starts (`executor_start`)."""
SIGNALLED = 128
"""Exit codes above this one mean that a signal ended the process."""
ZYGOTE_LOST = 70
"""Exit code of an executor that lost its zygote."""
IMAGE_FAILURES = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
    }
)
OWN_LIMITS = ("Usage of EmptyDir", "Pod ephemeral", "Container ")
"""How a kubelet's message begins if the pod exceeded a limit; otherwise its machine is short."""
CONTAINER_FAILURES = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)
NODE_NOT_READY = "NodeNotReady"
LOST_NODE = frozenset({"NodeLost", NODE_NOT_READY, "DeletionByTaintManager", "DeletionByPodGC"})
"""Reasons that mean that the pod's node does not answer, or does not exist any more."""
MAX_MESSAGE = 1000
MAX_EXIT_MESSAGE = 4096
"""Bytes that a container can leave behind when it ends: the report of a probe is one."""


@dataclass(frozen=True, slots=True)
class PodState:
    name: str
    uid: str
    version: str
    """Its resource version."""
    labels: dict[str, str]
    annotations: dict[str, str]
    created_at: float = 0.0
    """Seconds since 1970, by the clock of the cluster."""
    phase: str = "Pending"
    ip: str = ""
    machine: str = ""
    """The Kubernetes node that it was scheduled to."""
    deleting: bool = False
    """Whether it has a deletion timestamp."""
    reason: str = ""
    message: str = ""
    disruption: str = ""
    """Why the cluster ends it; empty if it does not."""
    disruption_message: str = ""
    unready: str = ""
    """Why it is not ready, if it was."""
    unscheduled: str = ""
    """Why it has no machine yet."""
    waiting: str = ""
    """Why its container does not run yet."""
    waiting_message: str = ""
    running: bool = False
    exit_code: int | None = None
    exit_reason: str = ""
    exit_message: str = ""
    image_id: str = ""
    resources: dict[str, Any] = field(default_factory=dict)
    """Limits that its container really has; empty until its kubelet reports them."""
    limits: dict[str, Any] = field(default_factory=dict)
    """Limits that were asked for."""
    resize: str = ""
    """Why a change of its limits is not done yet."""
    resizing: bool = False
    """Whether its kubelet is changing its limits; `resources` may be those before then."""
    generation: int = 0
    """Version of what was asked for."""
    observed: int = 0
    """The one that its kubelet has accepted or refused; 0 in clusters that do not report it."""

    @property
    def instance_id(self) -> str:
        return self.labels.get(Label.INSTANCE, "")

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed") or self.exit_code is not None

    @property
    def on_lost_machine(self) -> bool:
        """Whether the cluster gave it up because its machine does not answer."""
        return self.deleting and not self.ended and self.unready in LOST_NODE

    @property
    def is_disrupted(self) -> bool:
        """Whether the cluster or a person ends it while it runs, for example by an eviction."""
        return self.deleting and not self.ended and not self.on_lost_machine


def pod_state(pod: dict[str, Any]) -> PodState:
    """From a pod as the API server describes it."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    status = pod.get("status") or {}
    conditions = {item["type"]: item for item in status.get("conditions") or ()}
    disrupted = _when(conditions.get("DisruptionTarget"), "True")
    unready = _unready(conditions)
    scheduled = _when(conditions.get("PodScheduled"), "False")
    pending = _when(conditions.get("PodResizePending"), "True")
    resizing = _when(conditions.get("PodResizeInProgress"), "True")
    container = _container(status, "containerStatuses")
    state = container.get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
    if waiting.get("reason", "PodInitializing") == "PodInitializing":
        # A container before it may fail to get its image, or to start.
        waiting = _first_waiting(status) or waiting
    return PodState(
        name=metadata["name"],
        uid=metadata["uid"],
        version=metadata["resourceVersion"],
        labels=metadata.get("labels") or {},
        annotations=metadata.get("annotations") or {},
        created_at=_seconds(metadata.get("creationTimestamp")),
        phase=status.get("phase") or "Pending",
        ip=status.get("podIP") or "",
        machine=spec.get("nodeName") or "",
        deleting="deletionTimestamp" in metadata,
        reason=status.get("reason") or "",
        message=(status.get("message") or "")[:MAX_MESSAGE],
        disruption=disrupted.get("reason") or "",
        disruption_message=(disrupted.get("message") or "")[:MAX_MESSAGE],
        unready=status.get("reason") or unready,
        unscheduled=(scheduled.get("message") or scheduled.get("reason") or "")[:MAX_MESSAGE],
        waiting=waiting.get("reason") or "",
        waiting_message=(waiting.get("message") or "")[:MAX_MESSAGE],
        running="running" in state,
        exit_code=ended.get("exitCode"),
        exit_reason=ended.get("reason") or "",
        exit_message=(ended.get("message") or "")[:MAX_EXIT_MESSAGE],
        image_id=container.get("imageID") or "",
        resources=(container.get("resources") or {}).get("limits") or {},
        limits=_limits(spec),
        resize=pending.get("reason") or "",
        resizing=bool(resizing),
        generation=metadata.get("generation") or 0,
        observed=status.get("observedGeneration") or 0,
    )


def _seconds(timestamp: str | None) -> float:
    if timestamp is None:
        return 0.0
    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()


def _when(condition: dict[str, Any] | None, status: str) -> dict[str, Any]:
    """The condition, if it has this status; otherwise nothing."""
    return condition if condition is not None and condition["status"] == status else {}


def _unready(conditions: dict[str, dict[str, Any]]) -> str:
    """
    Why the pod is not ready; empty if it is. A cluster whose machine does not report marks its
    pods as not ready without a reason; a kubelet would report their containers as not ready too.
    """
    found = _when(conditions.get("Ready"), "False")
    if found and not found.get("reason") and _when(conditions.get("ContainersReady"), "True"):
        return NODE_NOT_READY
    return found.get("reason") or ""


def _container(status: dict[str, Any], kind: str) -> dict[str, Any]:
    for item in status.get(kind) or ():
        if item["name"] == CONTAINER:
            return dict(item)
    return {}


def _limits(spec: dict[str, Any]) -> dict[str, Any]:
    for item in spec.get("containers") or ():
        if item["name"] == CONTAINER:
            return dict((item.get("resources") or {}).get("limits") or {})
    return {}


def _first_waiting(status: dict[str, Any]) -> dict[str, Any]:
    for item in (
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ):
        waiting = (item.get("state") or {}).get("waiting")
        if waiting and waiting.get("reason") != "PodInitializing":
            return dict(waiting)
    return {}


def observation(pod: PodState) -> Observation:
    """The state of the instance in a pod that exists."""
    if pod.on_lost_machine:
        return Observation(State.EXITED, Cause.NODE_LOST, _lost(pod))
    if pod.ended:
        cause, message = _end(pod)
        return Observation(State.EXITED, cause, message)
    if pod.running and pod.is_disrupted:
        return Observation(State.RUNNING, Cause.EVICTED, _disruption(pod))
    if pod.running:
        return Observation(State.RUNNING)
    # It never ran, or its machine does not report.
    return Observation(State.EXITED if pod.phase == "Pending" else State.UNKNOWN)


def observation_of_deleted(last: PodState | None) -> Observation:
    """The state of an instance without a pod; `last` is how the pod was last seen."""
    if last is None:
        return Observation(State.GONE)
    if last.unready in LOST_NODE or last.disruption == "DeletionByPodGC":
        return Observation(State.GONE, Cause.NODE_LOST, _lost(last))
    if last.ended:
        cause, message = _end(last)
        return Observation(State.GONE, cause, message)
    if last.disruption:
        return Observation(State.GONE, Cause.EVICTED, _disruption(last))
    return Observation(State.GONE)


def _lost(pod: PodState) -> str:
    reason = pod.disruption or pod.unready
    return f"The cluster lost machine {pod.machine} ({reason}). {pod.disruption_message}".strip()


def _disruption(pod: PodState) -> str:
    if not pod.disruption:
        return "The pod was deleted."
    return f"The cluster ended the pod ({pod.disruption}): {pod.disruption_message}"


def _last_words(pod: PodState) -> str:
    """What the executor wrote, apart from the handshake of its start."""
    lines = pod.exit_message.splitlines()
    return "\n".join(line for line in lines if line not in HANDSHAKE)


def _end(pod: PodState) -> tuple[Cause, str | None]:
    if pod.exit_reason == "OOMKilled":
        return Cause.OOM, "The container used more memory than its limit (OOMKilled)."
    if pod.reason == "Evicted":
        own = pod.message.startswith(OWN_LIMITS) and "exceed" in pod.message
        cause = Cause.DISK if own else Cause.EVICTED
        return cause, f"The kubelet evicted the pod: {pod.message}"
    if pod.reason == "DeadlineExceeded":
        return Cause.TIMEOUT, f"The cluster ended the pod: {pod.message or pod.reason}"
    if pod.disruption and (pod.unready in LOST_NODE or pod.disruption == "DeletionByPodGC"):
        return Cause.NODE_LOST, _lost(pod)
    if pod.disruption:
        return Cause.EVICTED, _disruption(pod)
    if pod.reason in ("Preempting", "Terminated", "Shutdown", "NodeShutdown"):
        return Cause.EVICTED, f"The cluster ended the pod ({pod.reason}): {pod.message}"
    message = _last_words(pod) or pod.message or None
    if pod.exit_code is not None and pod.exit_code > SIGNALLED:
        return Cause.SIGNAL, message
    return Cause.EXIT, message
