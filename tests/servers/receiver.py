"""
A receiver of webhooks as a user would write it: it uses no code of Atoll.

Each request is recorded with its body and headers. Its responses can be configured and delayed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True)
class Received:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.body)
        return content

    def signed_with(self, secret: str) -> bool:
        """By the words of the Standard Webhooks specification."""
        kind, _, encoded = secret.partition("_")
        assert kind == "whsec"
        content = b".".join(
            [
                self.headers["webhook-id"].encode(),
                self.headers["webhook-timestamp"].encode(),
                self.body,
            ]
        )
        digest = hmac.digest(base64.b64decode(encoded), content, hashlib.sha256)
        version, _, signature = self.headers["webhook-signature"].partition(",")
        return version == "v1" and base64.b64decode(signature) == digest


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """The sender may be killed at any time."""


class Receiver:
    def __init__(self) -> None:
        self.received: list[Received] = []
        self.statuses: list[int] = []
        """Status codes of the next responses; then 200."""
        self.location: str | None = None
        self.open = threading.Event()
        """While it is not set, requests wait."""
        self.open.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                status = receiver._take(Received(self.path, headers, body))
                receiver.open.wait(60)
                self.send_response(status)
                if receiver.location is not None:
                    self.send_header("location", receiver.location)
                self.send_header("content-length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                receiver._take(Received(self.path, {}, b"null"))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/hook"

    def _take(self, received: Received) -> int:
        with self._changed:
            self.received.append(received)
            status = self.statuses.pop(0) if self.statuses else 200
            self._changed.notify_all()
        return status

    def wait_for(self, count: int, seconds: float = 30.0) -> list[Received]:
        """The first so many requests, when they have come."""
        with self._changed:
            there = self._changed.wait_for(lambda: len(self.received) >= count, seconds)
            assert there, f"{len(self.received)} of {count} requests came"
            return self.received[:count]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.open.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
