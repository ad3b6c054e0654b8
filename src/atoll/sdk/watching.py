"""
What happens to files, as the server tells it; a line that is lost is made again.

Nothing is told twice and there are no numbers: after each break `overflow` says that something may
have been missed.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from atoll.errors import PermanentError, TemporaryError
from atoll.sdk.decode import named
from atoll.sdk.events import messages
from atoll.sdk.patience import Patience
from atoll.sdk.values import FileEvent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from atoll.sdk.connection import Connection
    from atoll.sdk.events import Message

# Longer than the server leaves between two comments.
_SILENCE = 45.0
# A connection that stood this long shows that the server is there, whatever cut it.
_STOOD = 1.0
_CHANGES = ("created", "modified", "deleted", "moved")


async def watch(
    connection: Connection, path: str, query: Mapping[str, Any]
) -> AsyncGenerator[FileEvent, None]:
    patience, begun = Patience(), False
    now = asyncio.get_running_loop().time
    while True:
        since: float | None = None
        try:
            async with connection.stream(
                "GET",
                path,
                query=query,
                headers={"accept": "text/event-stream"},
                wait=_SILENCE,
            ) as response:
                async for message in messages(response.aiter_raw()):
                    if message.event == "watching":
                        since = now()
                        yield FileEvent("overflow" if begun else "watching")
                        begun = True
                    elif message.event == "end":
                        if _content(message).get("code") == "file_not_found":
                            return
                        break
                    elif message.event == "overflow" or message.event in _CHANGES:
                        yield _event(message)
            raise TemporaryError("The watching was cut.", code="stream_cut")
        except TemporaryError as error:
            if not begun:
                raise
            if since is not None and now() - since > _STOOD:
                patience.renew()
            await patience.endure(error)


def _event(message: Message) -> FileEvent:
    content = _content(message)
    kind: Any = message.event
    source = content.get("encoded_from")
    try:
        path = named(content.get("encoded_path", ""))
        return FileEvent(kind, path, None if source is None else named(source))
    except (AttributeError, TypeError) as error:
        raise _bad(error) from None


def _content(message: Message) -> dict[str, Any]:
    try:
        content = json.loads(message.data)
    except ValueError as error:
        raise _bad(error) from None
    return content if isinstance(content, dict) else {}


def _bad(error: Exception) -> PermanentError:
    return PermanentError(
        f"The server's answer is not an event of a file: {error}", code="bad_answer"
    )
