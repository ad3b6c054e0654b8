"""Responses to requests that still run when the server's shutdown time-out is over."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from atoll.api.rest.problems import problem
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ShutdownResponse:
    """
    Turns the cancellation of a request at shutdown into a problem document, or into the end of an
    event stream. Otherwise the server would report an internal error.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, may_end = False, False

        async def observed_send(message: Message) -> None:
            nonlocal started, may_end
            if message["type"] == "http.response.start":
                started = True
                may_end = all(name.lower() != b"content-length" for name, _ in message["headers"])
            elif not message.get("more_body"):
                may_end = False
            await send(message)

        try:
            await self._app(scope, receive, observed_send)
        except asyncio.CancelledError:
            if not started:
                await problem(_shutting_down())(scope, receive, send)
            elif may_end:
                # An event stream: its client resumes with the last event's number.
                await send({"type": "http.response.body", "body": b""})
            else:
                raise


def _shutting_down() -> TemporaryError:
    return TemporaryError(
        "The server is shutting down. Your request may still be running: look it up by its id, or "
        "retry with the same id or Idempotency-Key.",
        code="shutting_down",
    )
