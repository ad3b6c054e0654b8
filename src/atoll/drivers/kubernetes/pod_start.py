"""
Waits until the cluster has started a pod: found a machine, pulled the image, run the container.

Each delay is reported in the cluster's own words, and each wait is bounded. A failure becomes the
error that tells what to do about it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from atoll.drivers.kubernetes.errors import pull_error, translated
from atoll.drivers.kubernetes.pod_state import CONTAINER_FAILURES, IMAGE_FAILURES
from atoll.errors import InstanceNotStarted, NodeFull, PermanentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.drivers.kubernetes.pod_state import PodState
    from atoll.drivers.kubernetes.pod_watch import PodWatch
    from atoll.settings import KubernetesSettings

STARTING = frozenset({"", "ContainerCreating", "PodInitializing"})
"""Reasons to wait that every pod has for a moment."""
FINAL_IMAGE_FAILURES = IMAGE_FAILURES - {"ErrImagePull"}
"""A first failure to pull may be one of the network; the kubelet tries again."""


async def wait_until_running(
    watch: PodWatch,
    created: PodState,
    settings: KubernetesSettings,
    on_delay: Callable[[str], None] | None,
) -> PodState:
    """
    Raises `NodeFull` if no machine has room in time, `pull_error`, `InstanceNotStarted` if the
    cluster ended the pod, and `PermanentError` if its program did.
    """
    delays = _Delays(on_delay)
    schedule_timeout = settings.schedule_timeout.total_seconds()
    try:
        async with asyncio.timeout(schedule_timeout):
            with translated():
                await watch.wait(created.name, lambda pod: delays.over(pod, _is_scheduled))
    except TimeoutError:
        raise NodeFull(
            f"The cluster found no machine for the instance within {schedule_timeout:g} s: "
            f"{delays.last or 'the scheduler gave no reason'}"
        ) from None
    try:
        async with asyncio.timeout(settings.image_pull_timeout.total_seconds()):
            with translated():
                pod = await watch.wait(created.name, lambda pod: delays.over(pod, _has_started))
    except TimeoutError:
        raise InstanceNotStarted(
            f"The cluster did not start the pod of the instance in time: {delays.last}"
        ) from None
    return _checked(created, pod)


class _Delays:
    """Reports why a pod does not run yet, each reason once."""

    def __init__(self, report: Callable[[str], None] | None) -> None:
        self._report = report
        self.last = ""

    def over(self, pod: PodState | None, condition: Callable[[PodState | None], bool]) -> bool:
        if condition(pod):
            return True
        reason = "" if pod is None else reason_to_wait(pod)
        if reason and reason != self.last:
            self.last = reason
            if self._report is not None:
                self._report(reason)
        return False


def reason_to_wait(pod: PodState) -> str:
    """Why the pod does not run yet; empty if that is the usual moment."""
    if pod.unscheduled:
        return pod.unscheduled
    return "" if pod.waiting in STARTING else f"{pod.waiting}: {pod.waiting_message}"


def _is_scheduled(pod: PodState | None) -> bool:
    return pod is None or bool(pod.machine) or pod.ended or pod.deleting


def _has_started(pod: PodState | None) -> bool:
    if pod is None or pod.ended or pod.deleting or (pod.running and bool(pod.ip)):
        return True
    return pod.waiting in FINAL_IMAGE_FAILURES or pod.waiting in CONTAINER_FAILURES


def _checked(created: PodState, pod: PodState | None) -> PodState:
    """The pod, if it runs; otherwise an error with what the cluster reports."""
    if pod is None or pod.uid != created.uid:
        raise InstanceNotStarted(f"Pod {created.name} was removed while it started.")
    if pod.running and not pod.deleting:
        return pod
    if pod.waiting in IMAGE_FAILURES:
        raise pull_error(pod.waiting, pod.waiting_message)
    why = pod.exit_message or pod.waiting_message or pod.message or pod.disruption_message
    reason = pod.waiting or pod.exit_reason or pod.reason or pod.disruption or pod.phase
    if (pod.exit_code is None and pod.waiting not in CONTAINER_FAILURES) or pod.deleting:
        # Its program never ran: the kubelet refused it (`OutOfcpu`), or the cluster ended it.
        raise InstanceNotStarted(f"The cluster ended the pod while it started ({reason}): {why}")
    raise PermanentError(
        f"Instance {pod.instance_id} ended while it started ({reason}): {why or 'no output'}",
        code="instance_failed",
    )
