"""
Runs uv inside the sandbox of an installation, and relays its connections to the package index.

A separate program, which the template's interpreter runs (Python 3.8 or newer, standard library
only). It reads an order (a JSON document) from an inherited socket, executes it, and answers with
another document. The output of uv is the log. The sandbox has no network: a port of its loopback is
relayed to the gateway's socket, which is bound into the sandbox.

Where no socket can be bound, the order, the answer and the data of all connections are sent over
the standard streams, in frames. The program ends when these are closed.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import site
import socket
import struct
import subprocess
import sys
import sysconfig
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    Connect = Callable[[socket.socket], None]
    """Relays a connection to the gateway."""

LISTEN_FD = 3
BUILD = "/build"
TARGET = BUILD + "/target"
PROGRAM = "/run/atoll/install.py"
UV = "/run/atoll/uv"
GATEWAY = "/run/atoll/gateway.sock"
PIECE = 256 * 1024
STANDARD = "-"
"""Argument: use the standard streams."""
FRAME = struct.Struct(">IcI")
"""Number of the connection, or 0; kind; number of bytes that follow."""
ORDER, ANSWER, OPEN, DATA, END, GONE = b"o", b"a", b"c", b"d", b"e", b"g"
"""Kinds. A connection ends in one direction with `END`, in both with `GONE`."""
MAX_REASON = 4000
"""Bytes of uv's output that are reported as the reason of a failure."""


def main() -> None:
    if sys.argv[1:] == [STANDARD]:
        streams = Streams()
        streams.answer(carry_out(streams.order(), streams.connect))
        return
    listener = socket.socket(fileno=LISTEN_FD)
    owner, _ = listener.accept()
    listener.close()
    with owner:
        received = []
        while True:
            data = owner.recv(PIECE)
            if not data:
                break
            received.append(data)
        answer = carry_out(json.loads(b"".join(received)), connect)
        owner.sendall(json.dumps(answer).encode())


def carry_out(order: dict[str, Any], to_gateway: Connect) -> dict[str, Any]:
    return describe(order) if order["kind"] == "describe" else install(order, to_gateway)


# Describing the interpreter


def describe(order: dict[str, Any]) -> dict[str, Any]:
    from importlib import metadata

    if order["hooks"]:
        site.main()
    else:
        # As the executor does: packages, without the start-up code that they bring.
        sys.path.extend(site.getsitepackages())
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name and version:
            # The first one on the path is the one that is imported.
            found.setdefault(normalised(name), str(version))
    return {
        "version": "%s %s" % (sys.implementation.name, sys.version.split()[0]),
        "platform": "%s %s" % (sysconfig.get_platform(), sysconfig.get_config_var("SOABI")),
        "packages": found,
    }


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# Connections to the gateway


def relay(to_gateway: Connect) -> int:
    """Relay connections to the gateway; returns the local port."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, to_gateway), daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def _accept(listener: socket.socket, to_gateway: Connect) -> None:
    while True:
        client, _ = listener.accept()
        to_gateway(client)


def connect(client: socket.socket) -> None:
    """Connect to the socket that is bound into the sandbox."""
    gateway = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        gateway.connect(GATEWAY)
    except OSError:
        client.close()
        gateway.close()
        return
    for pair in ((client, gateway), (gateway, client)):
        threading.Thread(target=_pump, args=pair, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while True:
            data = source.recv(PIECE)
            if not data:
                break
            target.sendall(data)
    except OSError:
        pass
    for end, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        try:
            end.shutdown(how)
        except OSError:
            pass


class Streams:
    """Sends the answer and the data of connections over the standard streams, in frames."""

    def __init__(self) -> None:
        self._in, self._out = os.dup(0), os.dup(1)
        # Other programs must not write to the stream of frames, nor read from it.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        os.close(nothing)
        self._writing = threading.Lock()
        self._clients: dict[int, socket.socket] = {}
        self._last = 0

    def order(self) -> dict[str, Any]:
        _, _, data = self._receive()
        threading.Thread(target=self._listen, daemon=True).start()
        order: dict[str, Any] = json.loads(data)
        return order

    def answer(self, answer: dict[str, Any]) -> None:
        self._send(0, ANSWER, json.dumps(answer).encode())

    def connect(self, client: socket.socket) -> None:
        self._last += 1
        self._clients[self._last] = client
        self._send(self._last, OPEN)
        threading.Thread(target=self._forward, args=(self._last, client), daemon=True).start()

    def _forward(self, number: int, client: socket.socket) -> None:
        while True:
            try:
                data = client.recv(PIECE)
            except OSError:
                self._send(number, GONE)
                return
            if not data:
                self._send(number, END)
                return
            self._send(number, DATA, data)

    def _listen(self) -> None:
        while True:
            number, kind, data = self._receive()
            client = self._clients.get(number)
            if client is None:
                continue
            try:
                if kind == DATA:
                    client.sendall(data)
                    continue
                client.shutdown(socket.SHUT_WR if kind == END else socket.SHUT_RDWR)
            except OSError:
                self._send(number, GONE)
            # The forwarding thread still uses it; the socket is closed with its last reference.
            del self._clients[number]

    def _receive(self) -> tuple[int, bytes, bytes]:
        number, kind, size = FRAME.unpack(self._read(FRAME.size))
        return number, kind, self._read(size)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = os.read(self._in, size - len(data))
            if not piece:
                os._exit(1)  # The control plane does not wait for the answer any more.
            data += piece
        return data

    def _send(self, number: int, kind: bytes, data: bytes = b"") -> None:
        view = memoryview(FRAME.pack(number, kind, len(data)) + data)
        with self._writing:
            while view:
                view = view[os.write(self._out, view) :]


# Installing


def install(order: dict[str, Any], to_gateway: Connect) -> dict[str, Any]:
    for name, most in order["limits"].items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
    for name in ("home", "tmp", "cache"):
        os.makedirs(os.path.join(BUILD, name), exist_ok=True)
    os.environ.update(
        HOME=BUILD + "/home",
        TMPDIR=BUILD + "/tmp",
        UV_CACHE_DIR=BUILD + "/cache",
        UV_CONCURRENT_DOWNLOADS="8",
        UV_NO_PROGRESS="1",
        NO_COLOR="1",
    )
    index = "http://127.0.0.1:%d/simple" % relay(to_gateway)
    say("Looking for %s." % ", ".join(order["requirements"]))
    pinned, words = resolve(order, index, order["constraints"])
    if not pinned:
        return {"error": explain(order, index) or words or "uv found nothing to install."}
    have = order["have"]
    wanted = {
        name: (version, lines)
        for name, (version, lines) in pinned.items()
        if have.get(name) != version
    }
    for name in sorted(set(pinned) - set(wanted)):
        say("%s==%s is the template's." % (name, pinned[name][0]))
    if wanted:
        put("wanted.txt", "".join(lines for _, lines in wanted.values()))
        status, words = uv(
            "install", index, order, "--requirements", BUILD + "/wanted.txt", "--no-deps",
            "--require-hashes", "--target", TARGET, "--compile-bytecode",
        )  # fmt: skip
        if status != 0:
            return {"error": words or "uv ended with %d." % status}
    shutil.rmtree(BUILD + "/cache", ignore_errors=True)
    installed = ["%s==%s" % (name, pinned[name][0]) for name in sorted(pinned)]
    return {"installed": installed, "own": bool(wanted)}


def resolve(
    order: dict[str, Any], index: str, constraints: list[str]
) -> tuple[dict[str, tuple[str, str]], str]:
    """
    The version of each package by name, with its lines for the installer. Empty if the requirements
    cannot be resolved; the second value is then the reason.
    """
    put("asked.txt", "".join(line + "\n" for line in order["requirements"]))
    put("constraints.txt", "".join(line + "\n" for line in constraints))
    status, words = uv(
        "compile", index, order, BUILD + "/asked.txt", "--constraints", BUILD + "/constraints.txt",
        "--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--quiet",
        "--output-file", BUILD + "/pinned.txt",
        *(["--no-deps"] if order["exact"] else []),
    )  # fmt: skip
    pinned: dict[str, tuple[str, str]] = {}
    if status != 0:
        return pinned, words or "uv ended with %d." % status
    with open(BUILD + "/pinned.txt", encoding="utf-8") as file:
        text = file.read().replace("\\\n", " ")
    for line in text.splitlines():
        found = re.match(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;]+)((?:\s+--hash=\S+)+)", line)
        if found:
            name, version, hashes = found.groups()
            pinned[normalised(name)] = (version, "%s==%s%s\n" % (name, version, hashes))
    return pinned, ""


def explain(order: dict[str, Any], index: str) -> str:
    """The error if only the template's packages prevent a solution; empty otherwise."""
    if not order["constraints"]:
        return ""
    say("Checking whether the template's packages cause the conflict.")
    free, _ = resolve(order, index, [])
    if not free:
        return ""
    held = dict(line.split("==", 1) for line in order["constraints"])
    differing = [
        "%s %s (the template has %s)" % (name, version, held[name])
        for name, (version, _) in sorted(free.items())
        if held.get(name, version) != version
    ]
    return (
        "They conflict with the template's packages: they would install %s. Set "
        "allow_version_conflicts to replace the template's versions." % ", ".join(differing)
    )


def uv(command: str, index: str, order: dict[str, Any], *arguments: str) -> tuple[int, str]:
    """Run uv; returns its exit code and the end of its output."""
    words = [
        *order.get("uv", [UV]), "pip", command, *arguments, "--python", order["python"],
        "--default-index", index, "--no-config", "--no-python-downloads", "--keyring-provider",
        "disabled",
    ]  # fmt: skip
    if not order["source_builds"]:
        words.append("--no-build")
    tail = b""
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=BUILD,
        bufsize=0,
    ) as process:
        assert process.stdout is not None
        while True:
            data = process.stdout.read(PIECE)
            if not data:
                break
            tail = (tail + data)[-MAX_REASON:]
            os.write(1, data)
    text = tail.decode("utf-8", "replace")
    found = re.search("error: ", text)
    # What a build printed is in the log.
    reason = re.split(r"\[std(?:out|err)\]", text[found.end() :] if found else text)[0]
    return process.returncode, reason.strip()


def put(name: str, text: str) -> None:
    with open(os.path.join(BUILD, name), "w", encoding="utf-8") as file:
        file.write(text)


def say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
