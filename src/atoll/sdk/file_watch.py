"""
Live changes of files.

File events have no numbers, so a stream cannot resume after a lost connection. It reconnects and
yields `overflow`, because events may be missing.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from atoll.errors import PermanentError, TemporaryError
from atoll.sdk.decode import decode_path
from atoll.sdk.retry import Backoff
from atoll.sdk.sse import READ_TIMEOUT, STABLE_AFTER, messages
from atoll.sdk.values import FileEvent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from atoll.sdk.http_client import HttpClient
    from atoll.sdk.sse import Message

_CHANGES = ("created", "modified", "deleted", "moved")


async def watch(
    http: HttpClient, path: str, query: Mapping[str, Any]
) -> AsyncGenerator[FileEvent, None]:
    backoff, begun = Backoff(), False
    now = asyncio.get_running_loop().time
    while True:
        since: float | None = None
        try:
            async with http.stream(
                "GET",
                path,
                query=query,
                headers={"accept": "text/event-stream"},
                wait=READ_TIMEOUT,
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
            raise TemporaryError("The stream of file events was interrupted.", code="stream_cut")
        except TemporaryError as error:
            if not begun:
                raise
            if since is not None and now() - since > STABLE_AFTER:
                backoff.reset()
            await backoff.wait_or_raise(error)


def _event(message: Message) -> FileEvent:
    content = _content(message)
    kind: Any = message.event
    source = content.get("encoded_from")
    try:
        path = decode_path(content.get("encoded_path", ""))
        return FileEvent(kind, path, None if source is None else decode_path(source))
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
