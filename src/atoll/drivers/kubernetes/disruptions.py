"""
Instances whose pods the cluster ends: by an eviction, a drain, a preemption, or with their machine.

The watch reports a pod when it gets a deletion timestamp, long before it ends: until then a
checkpoint can be taken. What Atoll deletes itself has no grace period and is gone at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.drivers.kubernetes import pod_state
from atoll.drivers.kubernetes.instance_pods import handle_of, is_instance
from atoll.model.session import Cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.drivers.kubernetes.pod_state import PodState
    from atoll.drivers.kubernetes.pod_watch import PodWatch
    from atoll.model.instance import Handle

ENDED_BY_CLUSTER = frozenset({Cause.EVICTED, Cause.NODE_LOST})


class PodDisruptions:
    def __init__(self, watch: PodWatch) -> None:
        self._watch = watch

    def subscribe(self, observer: Callable[[Handle], None]) -> None:
        def changed(pod: PodState) -> None:
            if not is_instance(pod):
                return
            if pod.is_disrupted or pod_state.observation(pod).cause in ENDED_BY_CLUSTER:
                observer(handle_of(pod))

        self._watch.subscribe(changed)
