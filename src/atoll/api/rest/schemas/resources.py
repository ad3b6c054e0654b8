"""Limits of sessions and templates."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from atoll.api.rest.schemas.base import From, RequestBody, ResponseBody
from atoll.model.resources import Resources, format_cpu, format_size, parse_cpu, parse_size


class ResourcesIn(RequestBody, of=Resources):
    """Limits. The template's apply where none are given."""

    cpu: str | None = Field(None, examples=["1", "0.5", "500m"])
    memory: str | None = Field(None, examples=["512Mi"])
    disk: str | None = Field(None, examples=["1Gi"])
    max_processes: int | None = Field(None, ge=4, le=32_768)

    def over(self, base: Resources) -> Resources:
        """These limits where given, `base` elsewhere."""
        return Resources(
            cpu=base.cpu if self.cpu is None else parse_cpu(self.cpu),
            memory=base.memory if self.memory is None else parse_size(self.memory, "memory"),
            disk=base.disk if self.disk is None else parse_size(self.disk, "disk"),
            max_processes=self.max_processes or base.max_processes,
        )


class ResourcesOut(ResponseBody, of=Resources):
    cpu: Annotated[str, From(lambda limits: format_cpu(limits.cpu))]
    memory: Annotated[str, From(lambda limits: format_size(limits.memory))]
    disk: Annotated[str, From(lambda limits: format_size(limits.disk))]
    max_processes: int
