"""
A package index on loopback, whose packages are created on request.

It responds in JSON (PEP 691) or HTML (PEP 503), has core metadata beside wheels (PEP 658), supports
ranges, and records all requests. A test can delay a response, or replace it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import ssl
import tarfile
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Sequence


def wheel(
    name: str,
    version: str = "1.0",
    *,
    requires: Sequence[str] = (),
    files: dict[str, str] | None = None,
    scripts: dict[str, str] | None = None,
    extras: dict[str, Sequence[str]] | None = None,
    links: dict[str, str] | None = None,
) -> tuple[str, bytes, bytes]:
    """File name, content and metadata of a wheel with a module of its name."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    for extra, needed in (extras or {}).items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {each} ; extra == "{extra}"' for each in needed]
    metadata = "\n".join(lines) + "\n"
    content = {
        f"{module}.py": f"version = {version!r}\ndef main():\n    print({name!r}, version)\n"
    }
    content.update(files or {})
    content[f"{info}/METADATA"] = metadata
    content[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    if scripts:
        content[f"{info}/entry_points.txt"] = "[console_scripts]\n" + "".join(
            f"{command} = {target}\n" for command, target in scripts.items()
        )
    record = "".join(
        f"{path},sha256={_digest(text.encode())},{len(text.encode())}\n"
        for path, text in content.items()
    )
    content[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, text in content.items():
            archive.writestr(zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0)), text)
        for path, target in (links or {}).items():
            entry = zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = 0o120777 << 16
            archive.writestr(entry, target)
    return f"{module}-{version}-py3-none-any.whl", packed.getvalue(), metadata.encode()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


_BACKEND = """
def build_wheel(directory, config_settings=None, metadata_directory=None):
    import os
    {code}
    name = {wheel!r}
    with open(os.path.join(directory, name), "wb") as file:
        file.write(bytes.fromhex({content!r}))
    return name
"""


def sdist(name: str, version: str = "1.0", *, code: str = "pass") -> tuple[str, bytes]:
    """File name and content of a source distribution whose build runs `code`."""
    built, content, metadata = wheel(name, version)
    backend = _BACKEND.format(code=code.replace("\n", "\n    "), wheel=built, content=content.hex())
    files = {
        "PKG-INFO": metadata.decode(),
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\n'
        'backend-path = ["."]\n',
        "backend.py": backend,
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return f"{name}-{version}.tar.gz", packed.getvalue()


@dataclass
class Held:
    """A delayed response: `asked` is set by its request, `go` releases it."""

    asked: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)


class Index:
    def __init__(
        self,
        *,
        html: bool = False,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.html = html
        self.password = password
        self.packages: dict[str, dict[str, bytes]] = {}
        self.metadata: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.odd: dict[str, tuple[int, dict[str, str], bytes]] = {}
        """Status, headers and body by path, in the place of what there is."""
        self.held: dict[str, Held] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            # The handshake is made by the thread of the connection: a client may refuse it.
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for held in self.held.values():
            held.go.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        user = "" if self.password is None else f"reader:{self.password}@"
        return f"{self._scheme}://{user}127.0.0.1:{self.port}/simple/"

    def add(self, name: str, version: str = "1.0", **about: Any) -> Self:
        """A wheel."""
        file, content, metadata = wheel(name, version, **about)
        self.packages.setdefault(name, {})[file] = content
        self.metadata[file] = metadata
        return self

    def add_source(self, name: str, version: str = "1.0", *, code: str = "pass") -> Self:
        file, content = sdist(name, version, code=code)
        self.packages.setdefault(name, {})[file] = content
        return self

    def hold(self, path: str) -> Held:
        return self.held.setdefault(path, Held())

    # Answers

    def page(self, name: str) -> tuple[str, bytes]:
        files = self.packages[name]
        if self.html:
            anchors = "".join(
                f'<a href="/files/{file}#sha256={hashlib.sha256(content).hexdigest()}"'
                f"{' data-core-metadata=true' if file in self.metadata else ''}>{file}</a><br>\n"
                for file, content in files.items()
            )
            return "text/html", f"<!DOCTYPE html><html><body>{anchors}</body></html>".encode()
        listed = [
            {
                "filename": file,
                "url": f"../../files/{file}",
                "hashes": {"sha256": hashlib.sha256(content).hexdigest()},
                "size": len(content),
                "core-metadata": file in self.metadata,
            }
            for file, content in files.items()
        ]
        page = {"meta": {"api-version": "1.0"}, "name": name, "files": listed}
        return "application/vnd.pypi.simple.v1+json", json.dumps(page).encode()

    def find(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if path in self.odd:
            return self.odd[path]
        kind, _, rest = path.lstrip("/").partition("/")
        if kind == "simple" and rest.strip("/") in self.packages:
            media_type, content = self.page(rest.strip("/"))
            return 200, {"Content-Type": media_type}, content
        if kind == "files":
            if rest.endswith(".metadata") and rest[: -len(".metadata")] in self.metadata:
                return 200, {}, self.metadata[rest[: -len(".metadata")]]
            for files in self.packages.values():
                if rest in files:
                    return 200, {}, files[rest]
        return 404, {}, b"not here"

    def allowed(self, header: str | None) -> bool:
        if self.password is None:
            return True
        wanted = base64.b64encode(f"reader:{self.password}".encode()).decode()
        return header == f"Basic {wanted}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        index = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                index.asked.append(self.path)
                held = index.held.get(self.path)
                if held is not None:
                    held.asked.set()
                    held.go.wait(120)
                if index.allowed(self.headers.get("Authorization")):
                    status, headers, body = index.find(self.path)
                else:
                    status, headers, body = 401, {}, b"who are you"
                asked = self.headers.get("Range")
                if asked and status == 200 and self.path.startswith("/files/"):
                    first, _, last = asked.removeprefix("bytes=").partition("-")
                    begin = int(first) if first else max(0, len(body) - int(last))
                    end = min(int(last), len(body) - 1) if first and last else len(body) - 1
                    headers = {**headers, "Content-Range": f"bytes {begin}-{end}/{len(body)}"}
                    status, body = 206, body[begin : end + 1]
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if "Content-Length" not in headers:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                # The client may have disconnected: an installation that was ended.
                with contextlib.suppress(ConnectionError):
                    if self.command == "GET":
                        self.wfile.write(body)

            do_HEAD = do_GET

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError, ssl.SSLError):
                    super().handle()

            def log_message(self, format: str, *args: Any) -> None: ...

        return Handler
