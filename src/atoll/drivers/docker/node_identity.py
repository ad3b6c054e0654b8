"""
Name and key of a node, which its replicas share and which survive restarts.

The name labels everything that the node makes on its engine. The key signs the tokens of executors.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NAME_FILE, KEY_FILE = "docker-name", "docker-key"


@dataclass(frozen=True)
class NodeIdentity:
    name: str
    key: bytes = field(repr=False)

    def token(self, instance_id: str) -> str:
        """The token of an instance's executor. It is derived, so that no record contains it."""
        return hmac.new(self.key, instance_id.encode(), hashlib.sha256).hexdigest()


def load(directory: Path) -> NodeIdentity:
    """Read the identity, or create it on first use."""
    name = _read_or_create(directory / NAME_FILE, secrets.token_hex(8))
    key = _read_or_create(directory / KEY_FILE, secrets.token_hex(32))
    return NodeIdentity(name, bytes.fromhex(key))


def _read_or_create(path: Path, value: str) -> str:
    """The first of several processes creates the file, atomically."""
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            file.write(value)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
    return path.read_text()
