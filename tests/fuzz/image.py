"""
The interpreter of a hostile image: PID 1 of an instance, which speaks the protocol alone.

It runs on the standard library of the image. What it says of itself is right, so that its instance
is taken for a good one; the code of a run is executed here, with the stream at hand, and decides
what the control plane is sent. A path that is `lie` makes each answer about files a lie.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

HEADER = struct.Struct("!IIB")
HELLO, OPEN, DATA, OUTPUT, EVENT, END, ERROR = 1, 2, 3, 4, 5, 6, 7
RESULT: dict[str, Any] = {
    "exit_code": 0, "signal": None, "reason": None, "duration": 0.001, "began": 0.0, "usage": {},
    "sizes": {"1": 0, "2": 0}, "error": None, "artifacts": [], "artifacts_cut": False,
}  # fmt: skip
LIE = {"entry": {"path": 7, "size": "x"}, "entries": 5, "contexts": [[]], "processes": [None]}


class Connection:
    def __init__(self, connection: socket.socket, zygote: int) -> None:
        self._socket = connection
        self._zygote = zygote

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def frame(self, stream: int, kind: int, payload: bytes) -> None:
        self.send(HEADER.pack(len(payload), stream, kind) + payload)

    def say(self, stream: int, kind: int, value: Any) -> None:
        self.frame(stream, kind, json.dumps(value).encode())

    def serve(self) -> None:
        try:
            while True:
                length, stream, kind = HEADER.unpack(self._exactly(HEADER.size))
                payload = self._exactly(length)
                if kind == HELLO:
                    hello = {"version": 1, "zygote": self._zygote, "runs": []}
                    self.say(0, HELLO, hello)
                elif kind == OPEN:
                    self._request(stream, json.loads(payload))
        except OSError:
            pass  # The control plane hung up.

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise OSError("closed")
            data += piece
        return data

    def _request(self, stream: int, request: dict[str, Any]) -> None:
        op = request["op"]
        if op == "run":
            names = {
                "link": self, "stream": stream, "request": request, "RESULT": RESULT,
                "DATA": DATA, "OUTPUT": OUTPUT, "EVENT": EVENT, "END": END, "struct": struct,
            }  # fmt: skip
            exec(request["code"], names)
        elif op == "release":
            self.say(stream, END, {"preload_failed": {}})
        elif op == "shutdown":
            os._exit(0)
        elif request.get("path") == "lie" or op in ("context_list", "processes"):
            self.say(stream, END, LIE)
        elif op != "ack":
            self.say(stream, END, {})


def main() -> None:
    listener = socket.socket(fileno=json.loads(sys.argv[-1])["listen_fd"])
    zygote = os.fork()
    while zygote == 0:
        time.sleep(3600)
    if Path(sys.argv[0]).name == "mute":
        _kept = listener.accept()
        while True:
            time.sleep(3600)
    listener.setblocking(True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=Connection(connection, zygote).serve, daemon=True).start()


if __name__ == "__main__":
    main()
