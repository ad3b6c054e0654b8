"""Nodes, and the same nodes under their older name `runtimes`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from atoll.api.rest.schemas.base import From, Page, ResponseBody, encoder_of
from atoll.model.node import Drain, Node, NodeHealth
from atoll.model.template import REQUIREMENTS


def _metric(name: str, *, digits: int | None = None, unknown: float | None = None) -> From:
    def value(node: Node) -> Any:
        found = unknown if node.metrics is None else getattr(node.metrics, name)
        return found if digits is None or found is None else round(found, digits)

    return From(value)


class DrainOut(ResponseBody, of=Drain):
    total: int = Field(description="Sessions that the node had when the drain began.")
    left: int = Field(description="Sessions that have not left yet; at 0 the node is empty.")
    message: str | None = Field(description="Why a session cannot leave.")


_PROVIDES = From(lambda node: sorted(node.provides & REQUIREMENTS.keys()))


class NodeOut(ResponseBody, of=Node):
    id: str
    type: str
    url: str = Field(description="Address of one of its replicas.")
    status: Literal["healthy", "unhealthy"]
    problem: str | None = Field(description="Why it is unhealthy.")
    cordoned: bool = Field(description="Whether it is closed to new sessions.")
    drain: DrainOut | None = Field(description="Progress of its drain, if one was requested.")
    labels: dict[str, str]
    provides: Annotated[list[str], _PROVIDES] = Field(
        description="Security requirements of templates that it meets."
    )
    features: Annotated[
        list[str], From(lambda node: sorted(node.provides - REQUIREMENTS.keys()))
    ] = Field(description="What else it supports.")
    missing: dict[str, str] = Field(
        description="Security requirements that it does not meet, and why."
    )
    session_count: Annotated[int, From("sessions")] = Field(
        description="Sessions with an instance."
    )
    max_sessions: int | None
    cpu_usage: Annotated[float | None, _metric("cpu_usage", digits=4)] = Field(
        description="0 to 1, of all cores."
    )
    cpu_count: Annotated[int | None, _metric("cpu_count")]
    load_average: Annotated[float | None, _metric("load_average")]
    mem_usage: Annotated[float | None, _metric("mem_usage", digits=4)] = Field(
        description="0 to 1, of all memory."
    )
    mem_total: Annotated[int | None, _metric("mem_total")] = Field(description="Bytes.")
    disk_free: Annotated[int | None, _metric("disk_free")] = Field(description="Bytes.")
    cached_templates: Annotated[list[str], From("templates")] = Field(
        description="Versions of templates, as `id@version`."
    )
    building_templates: Annotated[list[str], From("building")]
    pool: dict[str, int] = Field(description="Ready instances by template.")
    shared_blobs: bool = Field(
        description="Whether its sessions can move to other nodes: their files are stored on S3."
    )
    last_heartbeat: Annotated[datetime | None, From("seen_at")] = Field(
        description="When it last reported."
    )
    failure_count: Annotated[int, From("failures")] = Field(
        description="Consecutive failed probes."
    )


class NodePage(Page[NodeOut]):
    pass


node_out = encoder_of(NodeOut)


def _status(node: Node) -> str:
    cordoned = node.status is NodeHealth.HEALTHY and node.cordoned
    return "draining" if cordoned else node.status.value


RuntimeStatus = Annotated[Literal["healthy", "unhealthy", "draining"], From(_status)]


class RuntimeOut(ResponseBody, of=Node):
    id: str
    type: str
    url: str
    status: RuntimeStatus
    cpu_usage: Annotated[float, _metric("cpu_usage", digits=4, unknown=0.0)]
    mem_usage: Annotated[float, _metric("mem_usage", digits=4, unknown=0.0)]
    session_count: Annotated[int, From("sessions")]
    max_sessions: int | None
    cached_templates: Annotated[
        list[str], From(lambda node: sorted({name.rpartition("@")[0] for name in node.templates}))
    ]
    last_heartbeat: Annotated[datetime, From("seen_at")]
    failure_count: Annotated[int, From("failures")]


class RuntimePage(Page[RuntimeOut]):
    pass


runtime_out = encoder_of(RuntimeOut)


class RuntimeHealth(ResponseBody, of=Node):
    id: str
    status: RuntimeStatus
    problem: str | None = Field(description="Why it is unhealthy.")
    checked_at: Annotated[datetime, From("seen_at")]
    provides: Annotated[list[str], _PROVIDES]
    missing: dict[str, str]


runtime_health_out = encoder_of(RuntimeHealth)


class RuntimeMetrics(ResponseBody, of=Node):
    id: str
    cpu_usage: Annotated[float, _metric("cpu_usage", digits=4)]
    cpu_count: Annotated[int, _metric("cpu_count")]
    load_average: Annotated[float, _metric("load_average")]
    mem_usage: Annotated[float, _metric("mem_usage", digits=4)]
    mem_total: Annotated[int, _metric("mem_total")]
    disk_free: Annotated[int, _metric("disk_free")]
    session_count: Annotated[int, From("sessions")]
    pool: dict[str, int]


runtime_metrics_out = encoder_of(RuntimeMetrics)
