"""
The executor as one file.

A zip of its modules that any Python from 3.8 on can import from, with byte code for the interpreter
that made it so that the usual instance compiles nothing at its start.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import marshal
import os
import sys
import zipfile
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = "atoll_executor"
BOOT = f"import sys; sys.path.insert(0, {{path!r}}); from {PACKAGE}.supervisor import main; main()"


def build() -> bytes:
    """The same modules on the same interpreter give the same bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as bundle:
        for module in sorted(
            resources.files("atoll.executor").iterdir(), key=lambda item: item.name
        ):
            if not module.name.endswith(".py"):
                continue
            source = module.read_bytes()
            name = f"{PACKAGE}/{module.name}"
            code = compile(
                source, f"{PACKAGE}/{module.name}", "exec", dont_inherit=True, optimize=2
            )
            # An "unchecked" hash-based header: the importer does not compare it with the source.
            header = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)
            for path, data in ((name, source), (f"{name}c", header + marshal.dumps(code))):
                bundle.writestr(zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0)), data)
    return content.getvalue()


def write(directory: Path) -> Path:
    """The bundle as a file in `directory`, named by its content."""
    data = build()
    tag = hashlib.sha256(data + sys.version.encode()).hexdigest()[:16]
    path = directory / f"executor-{tag}.pyz"
    if not path.exists():
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(data)
        temporary.chmod(0o444)
        temporary.replace(path)
    return path
