"""
The interpreter of a hostile image: PID 1 of an instance, which implements only the protocol.

It runs on the standard library of the image. Its hello is valid, so its instance is accepted; the
code of a run is executed here, with the stream available, and decides which bytes the control plane
receives. A path named `lie` makes all replies about files invalid.

In a container it is also the relay of its links, which hands its standard streams to PID 1: the
code of a run has the standard error of the relay as well. Under other names it fails at its start:
`mute` sends no hello, `silent` is never ready, and `loud` fills its standard output before it is.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

HEADER = struct.Struct("!IIB")
HELLO, OPEN, DATA, OUTPUT, EVENT, END, ERROR = 1, 2, 3, 4, 5, 6, 7
RESULT: dict[str, Any] = {
    "exit_code": 0, "signal": None, "reason": None, "duration": 0.001, "began": 0.0, "usage": {},
    "sizes": {"1": 0, "2": 0}, "error": None, "artifacts": [], "artifacts_cut": False,
}  # fmt: skip
LIE = {"entry": {"path": 7, "size": "x"}, "entries": 5, "contexts": [[]], "processes": [None]}
RELAY = "atoll-link"
"""The last argument of a relay, and the abstract name that it connects to."""
OWN_DIRECTORIES = ("/run/atoll/link", "/run/atoll/journal")
"""Of a container: PID 1 may write there until the control plane has closed them."""


class Connection:
    """By a socket, or by the standard streams of a relay: input, output and error."""

    def __init__(self, connection: socket.socket, streams: list[int], zygote: int) -> None:
        self._socket = connection
        self._streams = streams
        self._zygote = zygote

    def send(self, data: bytes) -> None:
        self._write(self._streams[1] if self._streams else self._socket.fileno(), data)

    def error(self, data: bytes) -> None:
        self._write(self._streams[2], data)

    @staticmethod
    def _write(target: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]

    def frame(self, stream: int, kind: int, payload: bytes) -> None:
        self.send(HEADER.pack(len(payload), stream, kind) + payload)

    def say(self, stream: int, kind: int, value: Any) -> None:
        self.frame(stream, kind, json.dumps(value).encode())

    def hang_up(self) -> None:
        """A relay ends with its connection."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        while self._streams:
            os.close(self._streams.pop())

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
            self.hang_up()  # The control plane did so first.

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            source = self._streams[0] if self._streams else self._socket.fileno()
            piece = os.read(source, size - len(data))
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


def relay() -> None:
    """Hand over the standard streams, and run as long as they are used."""
    with socket.socket(socket.AF_UNIX) as held:
        while True:
            try:
                held.connect(f"\0{RELAY}")
                break
            except ConnectionRefusedError:
                time.sleep(0.01)  # The first process of the container has just started, too.
        socket.send_fds(held, [b"\n"], [0, 1, 2])
        held.recv(1)


def contained(name: str) -> tuple[socket.socket, bool]:
    """In a container: the socket to listen on, and whether relays connect to it."""
    config = json.loads(sys.stdin.readline())
    while name == "silent":
        time.sleep(3600)
    while name == "loud":
        os.write(1, b"x" * 65_536)
    for directory in filter(os.path.isdir, OWN_DIRECTORIES):
        _litter(Path(directory))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(config["listen"])
    listener.listen(64)
    os.write(1, b"ready\n")
    return listener, config["peer"] is not None


def _litter(directory: Path) -> None:
    """One file of each kind; a journal still has those of the instance before."""
    if (directory / "directory").exists():
        return
    (directory / "link").symlink_to("/etc/passwd")
    (directory / "directory").mkdir()
    os.mkfifo(directory / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(directory / "socket"))


def main() -> None:
    name, last = Path(sys.argv[0]).name, sys.argv[-1]
    if last == RELAY:
        relay()
        return
    if last == "-":
        listener, relayed = contained(name)
    else:
        listener, relayed = socket.socket(fileno=json.loads(last)["listen_fd"]), False
    zygote = os.fork()
    while zygote == 0:
        time.sleep(3600)
    listener.setblocking(True)
    while True:
        connection, _ = listener.accept()
        streams = socket.recv_fds(connection, 1, 3)[1] if relayed else []
        made = Connection(connection, streams, zygote)
        while name == "mute":
            time.sleep(3600)
        threading.Thread(target=made.serve, daemon=True).start()


if __name__ == "__main__":
    main()
