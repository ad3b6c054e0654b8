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
from atoll.sdk.events import messages
from atoll.sdk.patience import Patience
from atoll.sdk.problems import error_of
from atoll.sdk.values import FeedEvent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from atoll.sdk.connection import Connection
    from atoll.sdk.events import Message

# Longer than the server leaves between two comments.
_SILENCE = 45.0


class AsyncEvents:
    """What changed on the server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def list(
        self, *, types: Sequence[str] = (), subject: str | None = None, after: int | None = None
    ) -> AsyncIterator[FeedEvent]:
        """
        What is kept, oldest first, or what came after a number.

        `types` are like "session.stopped" or "session.*"; `subject` is the id of one thing.
        """
        while True:
            query = {"types": _joined(types), "subject": subject, "after": after, "limit": 500}
            page = await self._connection.call("GET", "events", query=query)
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
        patience, begun = Patience(), False
        while True:
            query = {"types": _joined(types), "subject": subject, "after": place}
            try:
                async with self._connection.stream(
                    "GET",
                    "events",
                    query=query,
                    headers={"accept": "text/event-stream"},
                    wait=_SILENCE,
                ) as response:
                    async for message in messages(response.aiter_raw()):
                        if message.id.isdecimal():
                            begun, place = True, int(message.id)
                            patience.renew()
                        if message.event == "problem":
                            raise error_of(
                                int(_status(message)),
                                {},
                                message.data.encode(),
                                self._connection.target.key_origin,
                            )
                        if message.data:
                            yield _event(message)
                raise TemporaryError("The feed was cut.", code="stream_cut")
            except TemporaryError as error:
                if not begun:
                    raise
                await patience.endure(error)


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
