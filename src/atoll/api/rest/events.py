"""Routes of the event feed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from atoll.api.rest import problems, sse
from atoll.api.rest.responses import JsonResponse
from atoll.api.rest.schemas.events import EventPage
from atoll.api.rest.services import services_of
from atoll.errors import AtollError, InvalidRequest
from atoll.model.event import FeedPage
from atoll.service.events.service import types_of
from atoll.service.webhooks.delivery import event_out

router = APIRouter(tags=["events"])

LONGEST_WAIT = 60
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": EventPage, "content": {sse.MEDIA_TYPE: {}}}
}
Position = Annotated[int, Query(ge=0, le=2**63 - 1)]


class EventParameters(BaseModel):
    after: Annotated[
        Position | Literal["end"] | None,
        Query(
            description="Number of an event, or `end` for future events only. From the oldest "
            "event if omitted."
        ),
    ] = None
    types: Annotated[
        str | None,
        Query(max_length=2200, description="Types or patterns, like `session.*,execution.failed`."),
    ] = None
    subject: Annotated[
        str | None,
        Query(max_length=64, description="Id of the session, execution, node or template."),
    ] = None
    limit: Annotated[int, Query(ge=1, le=500)] = 100
    wait: Annotated[
        float,
        Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait for the first event."),
    ] = 0


@router.get("/events", responses=_RESPONSES)
async def get_events(
    request: Request,
    selected: Annotated[EventParameters, Query()],
    accept: Annotated[str, Header()] = "",
    last_event_id: Annotated[str | None, Header(max_length=32)] = None,
) -> Response:
    """
    List changes of sessions, executions, nodes and templates, in one order. With `Accept:
    text/event-stream`, follow them as they happen: the id of each event is its number, and
    `Last-Event-ID` resumes after it. 410 `events_expired` if the events there were deleted.
    """
    feed, chosen = services_of(request).feed, types_of(selected.types)
    after, subject = selected.after, selected.subject
    following = sse.MEDIA_TYPE in accept
    if following and last_event_id:
        after = _number(last_event_id)
    if after == "end":
        after = await feed.end()
    if not following:
        stretch = await feed.page(after, chosen, subject, limit=selected.limit, wait=selected.wait)
        items = [event_out(event) for event in stretch.events]
        return JsonResponse({"items": items, "after": stretch.through})
    position = await feed.position(after)
    reservation = services_of(request).streams.open(request.scope)
    check: Callable[[], Awaitable[None]] = request.scope.get("atoll.recheck", _always)
    return sse.encoded_stream(_texts(feed.follow(position, chosen, subject, check)), reservation)


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= 2**63:
        raise InvalidRequest(
            "Last-Event-ID: must be the number of an event.", field="Last-Event-ID"
        )
    return int(text)


async def _always() -> None:
    """Without API keys there is nothing to check."""


async def _texts(stretches: AsyncIterator[FeedPage]) -> AsyncIterator[str]:
    try:
        async for stretch in stretches:
            if not stretch.events:
                # Not an event, but the id to resume from.
                yield f"id: {stretch.through}\n\n"
            for event in stretch.events:
                content = json.dumps(event_out(event))
                yield f"id: {event.number}\nevent: {event.type}\ndata: {content}\n\n"
    except AtollError as error:
        content = bytes(problems.problem(error).body).decode()
        yield f"event: problem\ndata: {content}\n\n"
