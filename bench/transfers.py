"""
Files in and out: one that is large, and many that are small.

Beside `cp` on the same disk, which isolates nothing and knows no network, and `docker cp` into a
running container. Neither of them, nor Atoll, waits for the disk.
"""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import tarfile
from contextlib import ExitStack
from typing import TYPE_CHECKING

import atoll
from bench.__main__ import create, delete
from bench.engine import Engine, Unavailable
from bench.report import Way
from bench.server import Server

if TYPE_CHECKING:
    from pathlib import Path

    from bench.report import Report

MEBIBYTE = 1 << 20
SMALL_BYTES = 4096


class Wire:
    """One connection that carries bodies as they lie on the disk."""

    def __init__(self, server: Server, session: str) -> None:
        self._socket = socket.create_connection((server.host, server.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._path = f"/api/v1/sessions/{session}/files/"
        self._key = server.key
        self._block = bytearray(MEBIBYTE)

    def close(self) -> None:
        self._socket.close()

    def put(self, path: str, source: Path) -> None:
        with source.open("rb") as file:
            self._ask("PUT", path, os.fstat(file.fileno()).st_size)
            self._socket.sendfile(file)
        self._answer(io.BytesIO())

    def put_bytes(self, path: str, data: bytes) -> None:
        self._ask("PUT", path, len(data))
        self._socket.sendall(data)
        self._answer(io.BytesIO())

    def get(self, path: str, target: Path) -> None:
        self._ask("GET", path, 0)
        with target.open("wb", buffering=0) as file:
            self._answer(file)

    def get_bytes(self, path: str) -> bytes:
        self._ask("GET", path, 0)
        body = io.BytesIO()
        self._answer(body)
        return body.getvalue()

    def _ask(self, method: str, path: str, size: int) -> None:
        head = (
            f"{method} {self._path}{path} HTTP/1.1\r\nhost: bench\r\n"
            f"authorization: Bearer {self._key}\r\ncontent-length: {size}\r\n\r\n"
        )
        self._socket.sendall(head.encode())

    def _answer(self, body: io.RawIOBase | io.BytesIO) -> None:
        pending = b""
        while (end := pending.find(b"\r\n\r\n")) < 0:
            pending += self._read()
        head, rest = pending[:end].lower(), pending[end + 4 :]
        if head[9:10] != b"2":
            raise RuntimeError(pending[:500].decode(errors="replace"))
        if b"transfer-encoding: chunked" in head:
            self._chunks(rest, body)
            return
        length = next(
            int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")
        )
        body.write(rest)
        left = length - len(rest)
        view = memoryview(self._block)
        while left > 0:
            count = self._socket.recv_into(view[: min(left, len(view))])
            if not count:
                raise ConnectionError("the server closed the connection")
            body.write(view[:count])
            left -= count

    def _chunks(self, pending: bytes, body: io.RawIOBase | io.BytesIO) -> None:
        while True:
            while (end := pending.find(b"\r\n")) < 0:
                pending += self._read()
            size = int(pending[:end], 16)
            while len(pending) < end + 2 + size + 2:
                pending += self._read()
            body.write(pending[end + 2 : end + 2 + size])
            pending = pending[end + 2 + size + 2 :]
            if not size:
                return

    def _read(self) -> bytes:
        piece = self._socket.recv(262_144)
        if not piece:
            raise ConnectionError("the server closed the connection")
        return piece


def measure(report: Report, place: Path, *, size: int, small: int, rounds: int) -> None:
    """`size` is of the large file, in MiB; `small` is how many small files."""
    with ExitStack() as stack:
        engine: Engine | None = None
        missing = ""
        try:
            engine = stack.enter_context(Engine(place))
        except Unavailable as error:
            missing = str(error)
        limit = str((size + 64) * MEBIBYTE)
        server = stack.enter_context(Server(ATOLL_MAX_UPLOAD=limit, ATOLL_POOL__SIZE="1"))
        client = server.client()
        # A file that is replaced is there twice for a moment.
        session = create(client, disk=f"{3 * size + 1024}Mi")
        wire = Wire(server, session)
        stack.callback(wire.close)
        sdk = stack.enter_context(
            atoll.Atoll(f"http://{server.host}:{server.port}", api_key=server.key)
        )
        files = sdk.sessions.get(session).files
        report.section(f"one file of {size} MiB")
        if engine is None:
            report.skip("docker cp", missing)
        _large(report, place, wire, files, engine, size, rounds)
        report.section(f"{small} files of {SMALL_BYTES} bytes")
        if engine is None:
            report.skip("docker cp", missing)
        _many(report, place, wire, files, engine, small, rounds)
        delete(client, session)


def _large(
    report: Report,
    place: Path,
    wire: Wire,
    files: atoll.sdk.sync.Files,
    engine: Engine | None,
    size: int,
    rounds: int,
) -> None:
    source, target = place / "large", place / "copied"
    with source.open("wb") as file:
        for _ in range(size):
            file.write(os.urandom(MEBIBYTE))

    def gone() -> None:
        target.unlink(missing_ok=True)

    cp = Way("cp", lambda: _run("cp", "--reflink=never", str(source), str(target)), gone)
    ways = [cp]
    if engine is not None:
        held = engine

        def forget() -> None:
            held.forget("/large")

        ways.append(Way("docker cp, in", lambda: held.copy(str(source), ":/large"), forget))
    ways += [
        Way("REST PUT", lambda: wire.put("large", source), ours=True),
        Way("SDK upload", lambda: files.upload(source, "large"), ours=True),
    ]
    report.turns(ways, rounds, size=size * MEBIBYTE)
    ways = [cp]
    if engine is not None:
        ways.append(Way("docker cp, out", lambda: held.copy(":/large", str(target)), gone))
    ways += [
        Way("REST GET", lambda: wire.get("large", target), gone, ours=True),
        Way("SDK download", lambda: files.download("large", target), gone, ours=True),
    ]
    report.turns(ways, rounds, size=size * MEBIBYTE)
    _same(source, target)
    source.unlink()
    gone()


def _many(
    report: Report,
    place: Path,
    wire: Wire,
    files: atoll.sdk.sync.Files,
    engine: Engine | None,
    count: int,
    rounds: int,
) -> None:
    source, target = place / "many", place / "copies"
    source.mkdir()
    names = [f"{number:06d}" for number in range(count)]
    for name in names:
        (source / name).write_bytes(os.urandom(SMALL_BYTES))

    def gone() -> None:
        shutil.rmtree(target, ignore_errors=True)

    def empty() -> None:
        gone()
        target.mkdir()

    def removed() -> None:
        if any(entry.name == "many" for entry in files.list()):
            files.remove("many", recursive=True)

    def put() -> None:
        for name in names:
            wire.put(f"many/{name}", source / name)

    def upload() -> None:
        for name in names:
            files.upload(source / name, f"many/{name}")

    def put_archive() -> None:
        packed = subprocess.run(
            ["tar", "--create", "--directory", str(source), "."], check=True, capture_output=True
        )
        wire.put_bytes("many?archive=tar", packed.stdout)

    def get() -> None:
        for name in names:
            wire.get(f"many/{name}", target / name)

    def download() -> None:
        for name in names:
            files.download(f"many/{name}", target / name)

    def get_archive() -> None:
        packed = io.BytesIO(wire.get_bytes("many?archive=tar"))
        with tarfile.open(fileobj=packed) as archive:
            archive.extractall(target, filter="data")

    cp = Way("cp -r", lambda: _run("cp", "-r", "--reflink=never", str(source), str(target)), gone)
    ways = [cp]
    if engine is not None:
        held = engine

        def forget() -> None:
            held.forget("/many")

        ways.append(Way("docker cp, in", lambda: held.copy(str(source), ":/many"), forget))
    ways += [
        Way("REST PUT, one by one", put, removed, ours=True),
        Way("SDK upload, one by one", upload, removed, ours=True),
        Way("REST PUT, as one tar", put_archive, removed, ours=True),
    ]
    report.turns(ways, rounds, size=count * SMALL_BYTES)
    ways = [cp]
    if engine is not None:
        ways.append(Way("docker cp, out", lambda: held.copy(":/many", str(target)), gone))
    ways += [
        Way("REST GET, one by one", get, empty, ours=True),
        Way("SDK download, one by one", download, empty, ours=True),
        Way("REST GET, as one tar", get_archive, empty, ours=True),
    ]
    report.turns(ways, rounds, size=count * SMALL_BYTES)
    _same(source / names[-1], next(target.rglob(names[-1])))
    shutil.rmtree(source)
    gone()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _same(one: Path, other: Path) -> None:
    """What is fast has to be right as well."""
    subprocess.run(["cmp", str(one), str(other)], check=True)
