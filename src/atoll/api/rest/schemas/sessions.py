"""
Sessions.

A new field that a session stores and returns unchanged is one line in `SessionFields`: it is then
accepted at creation, changed by PATCH and part of every response.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field, model_validator

from atoll import ids
from atoll.api.rest.schemas.base import (
    From,
    Page,
    PatchBody,
    ResponseBody,
    Schema,
    Stale,
    encoder_of,
)
from atoll.api.rest.schemas.packages import Dependencies, InstallOptions, InstallOut
from atoll.api.rest.schemas.resources import ResourcesIn, ResourcesOut
from atoll.api.rest.schemas.secrets import SecretValue
from atoll.api.rest.schemas.types import Env, EnvChanges, EnvName, Id, LabelChanges, Labels, Name
from atoll.api.rest.schemas.volumes import VolumeMountIn, VolumeMountOut
from atoll.model import plan
from atoll.model.install import Install
from atoll.model.plan import Observed
from atoll.model.resources import Resources
from atoll.model.session import (
    MAX_TIMER,
    MAX_VOLUMES,
    Durability,
    Session,
    SessionStatus,
    Wanted,
    Warning,
    WorkspaceMode,
)
from atoll.service.sessions.new_session import NewSession
from atoll.service.sessions.provisioning import NO_EXTRAS, Extras
from atoll.service.sessions.secrets import MAX_SECRETS
from atoll.service.sessions.update import SessionChange

Timer = Annotated[int, Field(ge=0, le=MAX_TIMER)]
"""Seconds. In a request 0 means never; stored and returned as null."""


class SessionFields(Schema, of=Session):
    auto_start: bool = True
    idle_timeout: Timer | None = Field(
        None,
        description="Seconds without a request after which the session is stopped; 0 means never.",
    )
    archive_after: Timer | None = Field(
        None,
        description="Seconds that the session stays stopped before it is archived; 0 means never.",
    )
    delete_after: Timer | None = Field(
        None,
        description="Seconds that the session stays stopped or archived before it is terminated; "
        "0 means never.",
    )


class CreatedSessionFields(SessionFields):
    """Fields that cannot be changed after creation, or are changed in a way of their own."""

    capacity: int = Field(1, ge=1)
    env_vars: Env = Field({})
    workspace_mode: WorkspaceMode = Field(
        WorkspaceMode.SYNC,
        description="`sync`: on the node's disk, copied to the blob store. `mount`: in the blob "
        "store itself, mounted by the node.",
    )
    durability: Durability = Field(
        Durability.BACKGROUND,
        description="When the changes of an execution are in the blob store. `background`: soon "
        "after its result. `execution`: before its result is final.",
    )
    started_from: Id | None = Field(
        None,
        description="A session, running or ended, from whose last checkpoint this one starts.",
    )
    labels: Labels = Field({})
    node_labels: Labels = Field({})


EXTRAS = frozenset(
    {"secrets", "volumes", "workspace_mode", "durability", "started_from", "dependencies"}
)
"""Fields that most sessions do not set."""
SESSION_FIELDS = CreatedSessionFields.model_fields.keys() - EXTRAS - {"env_vars"}
"""Fields that become fields of the session unchanged."""


class CreateSession(InstallOptions, ResourcesIn, CreatedSessionFields, of=Session):
    """All fields are optional. Those that are omitted have the template's or server's defaults."""

    template_id: Name | None = Field(None, description="`python` if omitted.")
    timeout: int | None = Field(None, ge=1)
    resources: ResourcesIn | None = Field(None, description="The four limits as one object.")
    secrets: Annotated[dict[EnvName, SecretValue], Field(max_length=MAX_SECRETS)] = Field(
        {},
        description="Environment variables that are stored encrypted and never returned.",
        json_schema_extra={"writeOnly": True},
    )
    volumes: Annotated[list[VolumeMountIn], Field(max_length=MAX_VOLUMES)] = Field([])
    dependencies: Dependencies = Field([], description="Python packages to install.")
    fail_on_dependency_error: bool = Field(
        True, description="Fail the session if the packages cannot be installed."
    )

    @model_validator(mode="after")
    def _limits_once(self) -> CreateSession:
        flat = ResourcesIn.model_fields.keys() & self.model_fields_set
        if self.resources is not None and flat:
            raise ValueError(f"resources: give {', '.join(sorted(flat))} or resources, not both")
        return self

    @model_validator(mode="after")
    def _variables_once(self) -> CreateSession:
        if both := sorted(self.env_vars.keys() & self.secrets.keys()):
            raise ValueError(
                f"secrets: {', '.join(both)} is in env_vars too; give each variable once"
            )
        return self

    def limits(self, base: Resources) -> Resources:
        return (self.resources or self).over(base)

    def new_session(self) -> NewSession:
        given = SESSION_FIELDS & self.model_fields_set
        return NewSession(
            limits=self.limits,
            template_id=self.template_id,
            timeout=self.timeout,
            env_vars=self.env_vars,
            fields={name: getattr(self, name) for name in given},
            extras=self._extras(),
        )

    def _extras(self) -> Extras:
        if not EXTRAS & self.model_fields_set:
            return NO_EXTRAS
        return Extras(
            secrets={name: value.get_secret_value() for name, value in self.secrets.items()},
            volumes=tuple(mount.mount() for mount in self.volumes),
            workspace_mode=self.workspace_mode,
            durability=self.durability,
            started_from=self.started_from,
            install=self._install(),
        )

    def _install(self) -> Install | None:
        if not self.dependencies:
            return None
        return Install(
            dependencies=tuple(item.dependency() for item in self.dependencies),
            timeout=self.install_timeout,
            fail_on_error=self.fail_on_dependency_error,
            allow_conflicts=self.allow_version_conflicts,
        )


class UpdateSession(ResourcesIn, SessionFields, PatchBody, of=Session):
    """Only the fields that are given are changed."""

    resources: ResourcesIn | None = Field(None, description="The four limits as one object.")
    timeout: int | None = Field(
        None, ge=1, description="New lifetime in seconds, counted from now."
    )
    env_vars: EnvChanges = Field(
        {}, description="Merged into the session's variables; null removes a variable."
    )
    labels: LabelChanges = Field(
        {}, description="Merged into the session's labels; null removes a label."
    )

    def change(self) -> SessionChange:
        given = {name: getattr(self, name) for name in SessionFields.model_fields}
        return SessionChange(
            limits=(self.resources or self).over,
            timeout=self.timeout,
            env_vars=self.env_vars,
            labels=self.labels,
            fields={
                name: value if value or value is False else None
                for name, value in given.items()
                if value is not None
            },
        )


class WarningOut(ResponseBody, of=Warning):
    code: str
    message: str


def _pod_name(session: Session) -> str | None:
    if session.runtime_type != "kubernetes" or session.instance_id is None:
        return None
    return ids.cluster_object_name(session.instance_id)


class SessionOut(CreatedSessionFields, Stale, of=Session):
    id: str
    template_id: str
    status: SessionStatus
    wanted: Wanted
    observed: Annotated[Observed, From(plan.observed)] = Field(
        description="The status, with the four final statuses as one."
    )
    runtime_type: str
    runtime_node: str
    container_id: Annotated[str | None, From("instance_id")] = Field(
        description="Id of its instance, on any kind of node; null while it has none."
    )
    pod_name: Annotated[str | None, From(_pod_name)] = Field(
        description="Name of its pod if its node is a Kubernetes cluster; null while it has none."
    )
    resources: ResourcesOut
    timeout: int
    created_at: datetime
    updated_at: datetime
    expires_at: Annotated[
        datetime | None,
        From(lambda session: session.expires_at if session.rested_at is None else None),
    ] = Field(description="When its lifetime ends; null while it is stopped or archived.")
    ended_at: datetime | None
    cause: str | None
    message: str | None
    template_version: int
    secrets: Annotated[list[str], From(lambda session: sorted(session.secrets))] = Field(
        description="Names of its secrets."
    )
    volumes: list[VolumeMountOut]
    dependencies: Annotated[InstallOut | None, From("install")]
    warnings: list[WarningOut]
    active_at: datetime | None
    rested_at: datetime | None
    failures: int
    retry_at: datetime | None


class SessionPage(Page[SessionOut]):
    pass


session_out = encoder_of(SessionOut)


class ProcessOut(ResponseBody):
    pid: int = Field(description="Process id inside the session.")
    execution_id: str
    name: str


class ProcessPage(Page[ProcessOut]):
    pass
