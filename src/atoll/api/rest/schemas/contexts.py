"""Stateful contexts of a session."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from atoll.api.rest.schemas.base import Page, RequestBody, ResponseBody, encoder_of
from atoll.api.rest.schemas.types import Path


class CreateContext(RequestBody):
    language: Annotated[str, StringConstraints(max_length=64)] = Field(
        "python", description="Only `python` has contexts."
    )
    cwd: Path | None = Field(
        None,
        description="Initial working directory: relative to /workspace, which is the default, or "
        "an absolute path in the session.",
    )


class ContextOut(ResponseBody):
    id: str
    session_id: str
    language: str
    cwd: str
    state: Literal["idle", "busy", "dead"]
    created_at: datetime
    execution_count: int = Field(description="Executions since it was created or restarted.")


class ContextPage(Page[ContextOut]):
    pass


context_out = encoder_of(ContextOut)
