"""
A listener for the tokens of code, on the host's side.

On a cluster the files of an interrupted run can be lost with its pod, and its tokens with them. So
code sends each token to this listener too, and continues when it has arrived.
"""

from __future__ import annotations

import socketserver
import threading
from typing import Self

ACKNOWLEDGED = b"+"


class Witness:
    def __init__(self, host: str) -> None:
        # In the order in which they arrived, which is the order of each run.
        self._lines: dict[str, None] = {}
        lines = self._lines

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                lines[self.rfile.readline().decode().strip()] = None
                self.wfile.write(ACKNOWLEDGED)

        self._server = socketserver.ThreadingTCPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def lines(self) -> list[str]:
        """All tokens so far."""
        return [line for line in list(self._lines) if line]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
