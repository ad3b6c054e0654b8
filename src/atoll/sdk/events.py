"""
The event feed of the server: stored events and live ones.

After a lost connection the stream resumes without gaps or repeats.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

from atoll.errors import PermanentError, TemporaryError
from atoll.sdk.decode import decode
from atoll.sdk.error_response import error_from_response
from atoll.sdk.retry import Backoff
from atoll.sdk.sse import READ_TIMEOUT, messages
from atoll.sdk.values import FeedEvent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from atoll.sdk.http_client import HttpClient
    from atoll.sdk.sse import Message


class AsyncEvents:
    """Changes of sessions, executions, nodes and templates."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def list(
        self, *, types: Sequence[str] = (), subject: str | None = None, after: int | None = None
    ) -> AsyncIterator[FeedEvent]:
        """
        Stored events, oldest first, or those after a number.

        `types` are like "session.stopped" or "session.*"; `subject` is the id of one object.
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
        Live events without end. `after` is where to start: after the event with this number, or at
        the "start" or "end" of the stored events. Raises `Conflict` with the code `events_expired`
        if later events have been removed already.
        """
        position: int | str | None = None if after == "start" else after
        backoff, begun = Backoff(), False
        while True:
            query = {"types": _joined(types), "subject": subject, "after": position}
            try:
                async with self._http.stream(
                    "GET",
                    "events",
                    query=query,
                    headers={"accept": "text/event-stream"},
                    wait=READ_TIMEOUT,
                ) as response:
                    async for message in messages(response.aiter_raw()):
                        if message.id.isdecimal():
                            begun, position = True, int(message.id)
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
                raise TemporaryError("The event feed was interrupted.", code="stream_cut")
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
