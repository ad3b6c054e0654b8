"""
Builds the executor as one file, and the directory with the module and command for user code.

The file is a zip of `atoll.executor` and `atoll.protocol` that any Python from 3.8 on can import.
Both contain byte code for the interpreter that built them, so that most instances compile nothing,
and an index by which that interpreter imports it (`executor/bundle_import.py`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import marshal
import os
import secrets
import shutil
import sys
import zipfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.executor.bundle_import import INDEX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.resources.abc import Traversable

PACKAGE = "atoll_executor"
USER_MODULE = "user_module"
"""Package of the executor with what user code may import; written as a directory of its own."""
EXECUTOR = f"{PACKAGE}.executor"
_BOOT = "import sys; sys.path.insert(0, {{path!r}}); from {module} import main; main()"
BOOT = _BOOT.format(module=f"{EXECUTOR}.__main__")
FORK_SERVER_BOOT = _BOOT.format(module=f"{EXECUTOR}.fork_server")

MEMBER_TIME = (1980, 1, 1, 0, 0, 0)
LOCAL_HEADER_SIZE = 30
"""Bytes before the name of a member of a zip file."""
CODE_HEADER_SIZE = 16
"""Bytes before the code in a file with byte code."""

SOCKET = "atoll"
"""Abstract name of the socket that `MODULE` talks to."""
MODULE = "atoll_session"
_COMMAND = f"""#!/bin/sh
here=${{0%/*}}
exec "${{ATOLL_PYTHON:-python3}}" -I -S "$here/../lib/{MODULE}.py" "$@"
"""


def build(*, compressed: bool = False) -> bytes:
    """
    The same modules on the same interpreter give the same bytes. A compressed bundle has a third of
    the size; every Python imports it by `zipimport`.
    """
    content = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(content, "w", kind) as bundle:
        for name, source in sorted(_sources().items()):
            code = _compiled(source, name)
            for path, data in ((name, source), (f"{name}c", code)):
                bundle.writestr(zipfile.ZipInfo(path, MEMBER_TIME), data, kind)
        if not compressed:
            index = marshal.dumps(dict(_modules(bundle)))
            bundle.writestr(zipfile.ZipInfo(INDEX, MEMBER_TIME), index)
    return content.getvalue()


def _modules(bundle: zipfile.ZipFile) -> Iterator[tuple[str, tuple[int, int, bool]]]:
    """Offset and size of the code of each module, and whether it is a package."""
    for member in bundle.infolist():
        if member.filename.endswith(".pyc"):
            path = member.filename.removesuffix(".pyc")
            is_package = path.endswith("/__init__")
            start = member.header_offset + LOCAL_HEADER_SIZE + len(member.filename)
            yield (
                path.removesuffix("/__init__").replace("/", "."),
                (start + CODE_HEADER_SIZE, member.file_size - CODE_HEADER_SIZE, is_package),
            )


def _sources() -> dict[str, bytes]:
    """Content of the modules by path in the bundle, beneath one package for relative imports."""
    importer = resources.files("atoll.executor") / "bundle_import.py"
    sources = {f"{PACKAGE}/__init__.py": importer.read_bytes()}
    for package in ("executor", "protocol"):
        _add_modules(sources, resources.files(f"atoll.{package}"), f"{PACKAGE}/{package}")
    return sources


def _add_modules(sources: dict[str, bytes], package: Traversable, path: str) -> None:
    for item in package.iterdir():
        if item.name.endswith(".py"):
            sources[f"{path}/{item.name}"] = item.read_bytes()
        elif item.is_dir() and item.name not in (USER_MODULE, "__pycache__"):
            _add_modules(sources, item, f"{path}/{item.name}")


def _compiled(source: bytes, name: str) -> bytes:
    code = compile(source, name, "exec", dont_inherit=True, optimize=2)
    # An "unchecked" hash-based header: the importer does not compare it with the source.
    return importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + marshal.dumps(code)


def write(directory: Path) -> Path:
    """The bundle as a file in `directory`, named by what it is built from."""
    path = directory / f"executor-{_tag()}.pyz"
    if not path.exists():
        data = build()
        # Its own name: several starts of one process may share the directory.
        temporary = path.with_suffix(f".{secrets.token_hex(4)}")
        temporary.write_bytes(data)
        temporary.chmod(0o444)
        temporary.replace(path)
    return path


def _tag() -> str:
    # Not of the result: to compile the modules takes 60 ms.
    digest = hashlib.sha256(sys.version.encode() + Path(__file__).read_bytes())
    for name, source in sorted(_sources().items()):
        digest.update(f"{name} {len(source)} ".encode() + source)
    return digest.hexdigest()[:16]


def inside() -> dict[str, bytes]:
    """What user code may import (`lib`) and call (`bin`), by path."""
    source = (resources.files("atoll.executor.user_module") / f"{MODULE}.py").read_bytes()
    byte_code = f"lib/__pycache__/{MODULE}.{sys.implementation.cache_tag}.pyc"
    return {
        f"lib/{MODULE}.py": source,
        byte_code: _compiled(source, f"{MODULE}.py"),
        "bin/atoll-session": _COMMAND.encode(),
    }


def write_inside(directory: Path) -> Path:
    """The files of `inside` in `directory`, named by its content."""
    content = inside()
    tag = hashlib.sha256(b"".join(content.values())).hexdigest()[:16]
    path = directory / f"inside-{tag}"
    if path.exists():
        return path
    temporary = path.with_suffix(f".{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    for name, data in content.items():
        file = temporary / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(0o755 if name.startswith("bin/") else 0o644)
    for each in (temporary, *(item for item in temporary.rglob("*") if item.is_dir())):
        each.chmod(0o755)  # Whatever the umask: the instances' own users read it.
    try:
        temporary.rename(path)
    except OSError:
        if not path.exists():
            raise
        shutil.rmtree(temporary)  # Another process was faster.
    return path
