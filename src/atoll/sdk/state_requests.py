"""Requests for another state of a session: start, stop, pause, resume, archive."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from atoll.sdk.http_client import HttpClient

_MAX_WAIT = 60.0
"""Seconds that one request waits. A longer wait repeats the request."""

_REACHED = {
    "start": ("running",),
    "resume": ("running",),
    "pause": ("paused",),
    # Stopping an archived session leaves it archived.
    "stop": ("stopped", "archived"),
    "archive": ("archived",),
}
"""Statuses that complete a request, by its verb."""


async def request_state(http: HttpClient, path: str, verb: str, wait: float | None) -> Any:
    """
    The session once it has reached the state that `verb` asks for. Also returns after `wait`
    seconds, and when another client has requested a different state meanwhile.
    """
    loop = asyncio.get_running_loop()
    deadline = None if wait is None else loop.time() + max(0.0, wait)

    def remaining(limit: float) -> float:
        return limit if deadline is None else min(limit, max(0.0, deadline - loop.time()))

    wanted = None
    while True:
        seconds = remaining(_MAX_WAIT)
        try:
            answer = await http.call(
                "POST", f"{path}/{verb}", query={"wait": f"{seconds:g}"}, wait=seconds, once=True
            )
        except TemporaryError as error:
            # The request is recorded; the server handles it after others.
            if error.code != "archive_busy":
                raise
            await asyncio.sleep(remaining(error.retry_after))
            answer = await http.call("GET", path)
        wanted = wanted or answer["wanted"]
        expired = deadline is not None and loop.time() >= deadline
        if expired or answer["status"] in _REACHED[verb] or answer["wanted"] != wanted:
            return answer
