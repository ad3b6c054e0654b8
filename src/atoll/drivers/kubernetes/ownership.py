"""Labels pods with the session that has them, for people who look at the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from atoll.drivers.kubernetes.api import JSON_PATCH, Priority
from atoll.drivers.kubernetes.errors import (
    CONFLICT,
    INVALID,
    NOT_FOUND,
    ApiError,
    translated,
)
from atoll.drivers.kubernetes.labels import Label, value

if TYPE_CHECKING:
    from atoll.drivers.kubernetes.api import ApiClient
    from atoll.drivers.kubernetes.instance_pods import InstancePods
    from atoll.model.instance import Handle

LABEL = f"/metadata/labels/{Label.SESSION.replace('/', '~1')}"

log = structlog.get_logger(__name__)


class PodOwnership:
    def __init__(self, api: ApiClient, pods: InstancePods) -> None:
        self._api = api
        self._pods = pods

    async def record(self, handle: Handle, session_id: str) -> None:
        """Refused by the cluster if the pod is another one by now, or has a session already."""
        pod = await self._pods.find(handle)
        if pod is None or Label.SESSION in pod.labels:
            return
        change = [
            {"op": "test", "path": "/metadata/uid", "value": pod.uid},
            {"op": "test", "path": LABEL, "value": None},
            {"op": "add", "path": LABEL, "value": value(session_id)},
        ]
        with translated():
            try:
                path = f"{self._pods.path}/{pod.name}"
                await self._api.patch(path, change, kind=JSON_PATCH, priority=Priority.PATIENT)
            except ApiError as error:
                if error.status not in (NOT_FOUND, CONFLICT, INVALID):
                    raise
                log.info("pod.not_labelled", pod=pod.name, error=error.message)
