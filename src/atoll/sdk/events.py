"""
Events of the whole server: what is kept of them, and what happens.

A line that is lost is made again where it was, so nothing is missed and nothing told twice; a
server that is away is waited for.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

from atoll.errors import PermanentError, TemporaryError
from atoll.sdk.decode import decode
from atoll.sdk.error_response import error_from_response
from atoll.sdk.retry import Backoff
from atoll.sdk.sse import messages
from atoll.sdk.values import FeedEvent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from atoll.sdk.http_client import HttpClient
    from atoll.sdk.sse import Message

# Longer than the server leaves between two comments.
_READ_TIMEOUT = 45.0


class AsyncEvents:
    """What changed on the server."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def list(
        self, *, types: Sequence[str] = (), subject: str | None = None, after: int | None = None
    ) -> AsyncIterator[FeedEvent]:
        """
        What is kept, oldest first, or what came after a number.

        `types` are like "session.stopped" or "session.*"; `subject` is the id of one thing.
        """
        while True:
            query = {"types": _joined(types), "subject": subject, "after": after, "limit": 500}
            page = await self._http.call("GET", "events", query=query)
            for item in page["items"]:
                yield decode(FeedEvent, item)
            after = page["after"]
            if not page["items"]:
                return

    async def follow(
        self,
        *,
        types: Sequence[str] = (),
        subject: str | None = None,
        after: int | Literal["start", "end"] = "end",
    ) -> AsyncIterator[FeedEvent]:
        """
        What happens from now on, without end; or from a place on: after an event's number, or from
        the "start" of what is kept. Raises `Conflict` with code `events_expired` when that place is
        no longer kept.
        """
        place: int | str | None = None if after == "start" else after
        backoff, begun = Backoff(), False
        while True:
            query = {"types": _joined(types), "subject": subject, "after": place}
            try:
                async with self._http.stream(
                    "GET",
                    "events",
                    query=query,
                    headers={"accept": "text/event-stream"},
                    wait=_READ_TIMEOUT,
                ) as response:
                    async for message in messages(response.aiter_raw()):
                        if message.id.isdecimal():
                            begun, place = True, int(message.id)
                            backoff.reset()
                        if message.event == "problem":
                            raise error_from_response(
                                int(_status(message)),
                                {},
                                message.data.encode(),
                                self._http.endpoint.key_origin,
                            )
                        if message.data:
                            yield _event(message)
                raise TemporaryError("The feed was cut.", code="stream_cut")
            except TemporaryError as error:
                if not begun:
                    raise
                await backoff.wait_or_raise(error)


def _joined(types: Sequence[str]) -> str | None:
    return ",".join(types) or None


def _event(message: Message) -> FeedEvent:
    try:
        return decode(FeedEvent, json.loads(message.data))
    except ValueError as error:
        raise _bad(error) from None


def _status(message: Message) -> int:
    try:
        return int(json.loads(message.data)["status"])
    except (ValueError, KeyError, TypeError) as error:
        raise _bad(error) from None


def _bad(error: Exception) -> PermanentError:
    return PermanentError(f"The server's answer is not an event: {error}", code="bad_answer")
