"""What a pod's status means for its instance, for statuses that real clusters reported."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.drivers.kubernetes.labels import Label
from atoll.drivers.kubernetes.pod_start import reason_to_wait
from atoll.drivers.kubernetes.pod_state import (
    PodState,
    observation,
    observation_of_deleted,
    pod_state,
)
from atoll.model.instance import Observation, State
from atoll.model.session import Cause

RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


def condition(kind: str, status: str, reason: str = "", message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def terminated(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def pod(
    state: dict[str, Any] | None = None,
    *conditions: dict[str, str],
    deleting: bool = False,
    **status: Any,
) -> PodState:
    metadata = {
        "name": "atoll-inst-1",
        "uid": "u",
        "resourceVersion": "7",
        "labels": {Label.INSTANCE: "inst_1"},
    }
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    containers = [{"name": "executor", "state": state}] if state else []
    found = {"phase": "Running", "conditions": conditions, "containerStatuses": containers}
    return pod_state(
        {"metadata": metadata, "spec": {"nodeName": "n1"}, "status": {**found, **status}}
    )


EVICTED = condition("DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: evicting")
TAINTED = condition("DisruptionTarget", "True", "DeletionByTaintManager", "Taint manager: deleting")
NOT_READY = condition("Ready", "False"), condition("ContainersReady", "True")
"""As a cluster marks pods of a machine that it hears nothing of."""
ENDS = (
    condition("Ready", "False", "ContainersNotReady"),
    condition("ContainersReady", "False", "ContainersNotReady"),
)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(pod(RUNNING), Observation(State.RUNNING), id="running"),
        pytest.param(
            pod(RUNNING, EVICTED, deleting=True),
            Observation(
                State.RUNNING,
                Cause.EVICTED,
                "The cluster ended the pod (EvictionByEvictionAPI): Eviction API: evicting",
            ),
            id="evicted, with notice",
        ),
        pytest.param(
            pod(RUNNING, deleting=True),
            Observation(State.RUNNING, Cause.EVICTED, "The pod was deleted."),
            id="deleted by hand",
        ),
        pytest.param(
            pod(RUNNING, TAINTED, *NOT_READY, deleting=True),
            Observation(
                State.EXITED,
                Cause.NODE_LOST,
                "The cluster lost machine n1 (DeletionByTaintManager). Taint manager: deleting",
            ),
            id="machine lost",
        ),
        pytest.param(
            pod(RUNNING, TAINTED, *ENDS, deleting=True),
            Observation(
                State.RUNNING,
                Cause.EVICTED,
                "The cluster ended the pod (DeletionByTaintManager): Taint manager: deleting",
            ),
            id="taint of a machine that runs",
        ),
        pytest.param(
            pod(RUNNING, *NOT_READY),
            Observation(State.RUNNING),
            id="machine silent, not given up",
        ),
        pytest.param(
            pod(terminated(137, "OOMKilled"), phase="Failed"),
            Observation(
                State.EXITED,
                Cause.OOM,
                "The container used more memory than its limit (OOMKilled).",
            ),
            id="out of memory",
        ),
        pytest.param(
            pod(terminated(137, message="last words"), phase="Failed"),
            Observation(State.EXITED, Cause.SIGNAL, "last words"),
            id="killed",
        ),
        pytest.param(
            pod(terminated(0, "Completed"), phase="Succeeded"),
            Observation(State.EXITED, Cause.EXIT),
            id="exit",
        ),
        pytest.param(
            pod(
                terminated(137),
                phase="Failed",
                reason="Evicted",
                message='Usage of EmptyDir volume "workspace" exceeds the limit "80Mi".',
            ),
            Observation(
                State.EXITED,
                Cause.DISK,
                "The kubelet evicted the pod: "
                'Usage of EmptyDir volume "workspace" exceeds the limit "80Mi".',
            ),
            id="own disk limit exceeded",
        ),
        pytest.param(
            pod(
                None,
                phase="Failed",
                reason="Evicted",
                message="The node was low on resource: ephemeral-storage.",
            ),
            Observation(
                State.EXITED,
                Cause.EVICTED,
                "The kubelet evicted the pod: The node was low on resource: ephemeral-storage.",
            ),
            id="machine short of disk",
        ),
        pytest.param(
            pod(
                terminated(143),
                condition("DisruptionTarget", "True", "PreemptionByScheduler", "preempted by x"),
                phase="Failed",
            ),
            Observation(
                State.EXITED,
                Cause.EVICTED,
                "The cluster ended the pod (PreemptionByScheduler): preempted by x",
            ),
            id="preempted",
        ),
        pytest.param(
            pod(None, phase="Failed", reason="DeadlineExceeded", message="was active too long"),
            Observation(
                State.EXITED, Cause.TIMEOUT, "The cluster ended the pod: was active too long"
            ),
            id="deadline",
        ),
        pytest.param(
            pod(None, phase="Pending"), Observation(State.EXITED), id="never started"
        ),
        pytest.param(pod(None, phase="Unknown"), Observation(State.UNKNOWN), id="unknown"),
    ],
)  # fmt: skip
def test_a_status_is_observed_with_its_cause(seen: PodState, expected: Observation) -> None:
    assert observation(seen) == expected


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        pytest.param(None, None, id="never seen"),
        pytest.param(pod(RUNNING), None, id="deleted without a notice"),
        pytest.param(pod(RUNNING, EVICTED, deleting=True), Cause.EVICTED, id="evicted"),
        pytest.param(pod(RUNNING, TAINTED, *NOT_READY, deleting=True), Cause.NODE_LOST, id="lost"),
        pytest.param(pod(terminated(137, "OOMKilled")), Cause.OOM, id="out of memory"),
    ],
)
def test_the_cause_of_a_deleted_pod_is_how_it_was_last_seen(
    last: PodState | None, cause: Cause | None
) -> None:
    found = observation_of_deleted(last)
    assert (found.state, found.cause) == (State.GONE, cause)


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        pytest.param(pod(None, phase="Pending"), "", id="just created"),
        pytest.param(
            pod(
                None,
                condition("PodScheduled", "False", "Unschedulable", "0/2 nodes are available"),
                phase="Pending",
            ),
            "0/2 nodes are available",
            id="no machine",
        ),
        pytest.param(
            pod({"waiting": {"reason": "ContainerCreating"}}, phase="Pending"), "", id="creating"
        ),
        pytest.param(
            pod(
                {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
                phase="Pending",
            ),
            "ImagePullBackOff: no such image",
            id="no image",
        ),
    ],
)
def test_a_delay_is_reported_in_the_words_of_the_cluster(seen: PodState, reason: str) -> None:
    assert reason_to_wait(seen) == reason


def test_a_failure_of_the_lender_is_the_failure_of_the_pod() -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
    found = pod(
        {"waiting": {"reason": "PodInitializing"}},
        initContainerStatuses=[{"name": "interpreter", "state": waiting}],
        phase="Pending",
    )
    assert (found.waiting, found.waiting_message) == ("ErrImagePull", "no such image")


def test_messages_are_bounded() -> None:
    assert len(pod(terminated(1, message="x" * 100_000)).exit_message) == 4096


@pytest.mark.parametrize(
    ("written", "message"),
    [
        pytest.param("key\nready\n", None, id="the handshake"),
        pytest.param("key\nready\nMemoryError\n", "MemoryError", id="an error after it"),
    ],
)
def test_the_handshake_of_a_start_is_no_message(written: str, message: str | None) -> None:
    assert observation(pod(terminated(137, message=written))).message == message
