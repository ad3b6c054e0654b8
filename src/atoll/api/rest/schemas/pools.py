"""Warm pools of templates."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from atoll.api.rest.schemas.base import From, Page, ResponseBody, encoder_of
from atoll.model.pool_size import Limit


def _seconds(name: str) -> From:
    def value(state: object) -> float | None:
        found: float | None = getattr(state, name)
        return None if found is None else round(found, 3)

    return From(value)


class PoolOut(ResponseBody):
    template_id: Annotated[str, From("plan.template.id")]
    version: Annotated[int, From("plan.template.number")] = Field(
        description="Version of the template."
    )
    ready: int
    starting: int
    others: int = Field(description="Ready instances of the other replicas of its node.")
    target: Annotated[int, From("plan.target")] = Field(
        description="How many instances should be ready."
    )
    wanted: Annotated[int, From("plan.wanted")] = Field(
        description="How many would be, if the node had enough memory."
    )
    minimum: Annotated[int, From("plan.minimum")]
    maximum: Annotated[int, From("plan.maximum")]
    rate_per_minute: Annotated[float, From(lambda state: round(state.rate * 60, 2))] = Field(
        description="Sessions created per minute, recently."
    )
    start_seconds: Annotated[float | None, _seconds("start_seconds")] = Field(
        description="How long a start takes; null before the first one."
    )
    memory: int = Field(description="Bytes that are reserved for each instance.")
    hits: int = Field(description="Creates that got a ready instance.")
    misses: int = Field(description="Creates that had to wait for a start.")
    oldest_seconds: Annotated[float | None, _seconds("oldest_seconds")] = Field(
        description="Age of the oldest ready instance."
    )
    limited_by: Annotated[Limit | None, From("plan.limited_by")] = Field(
        description="Why the pool is smaller than wanted."
    )
    message: Annotated[str | None, From("plan.message")] = Field(
        description="Why instances could not be started."
    )


class PoolPage(Page[PoolOut]):
    pass


pool_out = encoder_of(PoolOut)
