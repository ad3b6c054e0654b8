"""A way to a database server that can be cut at a chosen moment."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self


class Proxy:
    """Passes on what it gets between its own port and another's."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._cut_after: bytes | None = None
        self._closed = False
        self.cut = threading.Event()
        """Set when the connection was cut; no client gets through until it is mended."""

    def cut_response_to(self, words: bytes) -> None:
        """The next time that they are sent: pass them on, and cut the way before the answer."""
        with self._lock:
            self._cut_after = words

    def mend(self) -> None:
        with self._lock:
            self._cut_after = None
        self.cut.clear()

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._sever()
        for thread in self._threads:
            thread.join(60)

    def _start(self, work: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=work, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.cut.is_set():
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._to))
            with self._lock:
                self._open |= {near, far}
            sent = threading.Event()
            self._start(self._forward_request, near, far, sent)
            self._start(self._forward_response, far, near, sent)

    def _forward_request(
        self, source: socket.socket, target: socket.socket, sent: threading.Event
    ) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                with self._lock:
                    if self._cut_after is not None and self._cut_after in data:
                        self._cut_after = None
                        # Before the server has it: its answer must not be quicker.
                        sent.set()
                target.sendall(data)
        _shut_down(source, target)

    def _forward_response(
        self, source: socket.socket, target: socket.socket, sent: threading.Event
    ) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if sent.is_set():
                    # It has answered, so it has done it.
                    self.cut.set()
                    self._sever()
                    return
                target.sendall(data)
        _shut_down(source, target)

    def _sever(self) -> None:
        with self._lock:
            ends, self._open = self._open, set()
        _shut_down(*ends)
        for end in ends:
            end.close()


def _shut_down(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
