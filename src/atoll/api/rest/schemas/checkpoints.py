"""Checkpoints of a session's workspace."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from atoll.api.rest.schemas.base import From, ResponseBody, encoder_of
from atoll.model.checkpoint import Checkpoint


class CheckpointOut(ResponseBody, of=Checkpoint):
    session_id: Annotated[str, From("id")]
    number: int = Field(description="Counts up with each checkpoint that contains a change.")
    created_at: datetime
    files: int
    size: int = Field(description="Bytes of all files together.")
    kept_until: datetime | None = Field(
        description="When it is deleted; null while the session exists."
    )


checkpoint_out = encoder_of(CheckpointOut)
