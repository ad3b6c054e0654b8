"""Events: changes of sessions, executions, nodes and templates."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from atoll.api.rest.schemas.base import ResponseBody


class EventOut(ResponseBody):
    number: int | None = Field(description="Position in the feed; each event's is one higher.")
    type: str = Field(examples=["execution.completed"])
    subject: str = Field(description="Id of what changed.")
    at: datetime
    data: dict[str, Any]


class EventPage(ResponseBody):
    items: list[EventOut]
    after: int = Field(description="Send it as `after` to get the next page.")
