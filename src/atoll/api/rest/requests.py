"""What requests may say. Checked by pydantic; fields that are not named here are refused."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from atoll.model.execution import Language
from atoll.model.resources import Resources, parse_cpu, parse_size
from atoll.model.template import REQUIREMENTS

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,254}$")]
EnvValue = Annotated[str, StringConstraints(max_length=32_768, pattern=r"^[^\x00]*$")]
Env = Annotated[dict[EnvName, EnvValue], Field(max_length=256)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Argument = Annotated[str, StringConstraints(max_length=131_071, pattern=r"^[^\x00]*$")]
Path = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ResourcesIn(Wire):
    """Limits. What is left out comes from the template."""

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


class CreateSession(ResourcesIn):
    template_id: Name | None = None
    timeout: int | None = Field(None, ge=1, description="Seconds of life.")
    env_vars: Env = {}
    resources: ResourcesIn | None = Field(None, description="The four limits, as one object.")

    @model_validator(mode="after")
    def _limits_once(self) -> CreateSession:
        flat = {"cpu", "memory", "disk", "max_processes"} & self.model_fields_set
        if self.resources is not None and flat:
            raise ValueError(f"give {', '.join(sorted(flat))} or resources, not both")
        return self

    def limits(self, base: Resources) -> Resources:
        return (self.resources or self).over(base)


class Execute(Wire):
    """`code` (in `language`) or `command`, one of the two."""

    code: Annotated[str, StringConstraints(max_length=4 * 1024 * 1024)] | None = None
    language: Language = Language.PYTHON
    command: Annotated[list[Argument], Field(min_length=1, max_length=1024)] | None = None
    timeout: float | None = Field(None, gt=0, description="Seconds.")
    event: Any = Field(default_factory=dict, description="Given to `handler`.")
    stdin: Annotated[str, StringConstraints(max_length=4 * 1024 * 1024)] | None = None
    env: Env = {}
    args: Annotated[list[Argument], Field(max_length=1024)] = []
    cwd: Path | None = Field(None, description="Beneath /workspace, which is the default.")
    wait: float | None = Field(
        None,
        ge=0,
        description="Seconds to wait: the answer is the result itself if it comes in time.",
    )

    @field_validator("event")
    @classmethod
    def _is_json(cls, event: Any) -> Any:
        if event:
            # The parser takes NaN and Infinity, which JSON does not have.
            json.dumps(event, allow_nan=False)
        return event

    @model_validator(mode="after")
    def _one_of_two(self) -> Execute:
        if (self.code is None) == (self.command is None):
            raise ValueError("give code or command, one of the two")
        return self


class Mkdir(Wire):
    path: Path
    parents: bool = True


class Move(Wire):
    source: Path
    target: Path
    overwrite: bool = False


class SecurityContext(Wire):
    require: list[Literal[tuple(REQUIREMENTS)]] = []  # type: ignore[valid-type]


class TemplateIn(Wire):
    name: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    image: str = Field("", max_length=4096, description="Root file system directory on the node.")
    base_image: str = Field("", max_length=4096)
    pre_installed_packages: Annotated[list[str], Field(max_length=1000)] = []
    default_resources: ResourcesIn = ResourcesIn()
    security_context: SecurityContext = SecurityContext()
    python: str = Field(
        "", max_length=4096, description="Interpreter; a virtual environment's works."
    )
    preload: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,254}$")]],
        Field(max_length=100),
    ] = []
    env: Env = {}
    pool_size: int = Field(0, ge=0, description="Ready instances to keep.")


class CreateTemplate(TemplateIn):
    id: Name | None = None
