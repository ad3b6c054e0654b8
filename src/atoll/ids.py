"""
Ids: a prefix that names the kind, and 80 random bits. An execution's id contains its date too.

A seed makes an id reproducible, so that a repeated request creates the same id again.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime


@dataclass(frozen=True, slots=True)
class Seed:
    digest: str
    """At least 20 hexadecimal digits, unique to the request."""
    at: datetime


def session_id(seed: Seed | None = None) -> str:
    return f"sess_{_bits(seed)}"


def instance_id() -> str:
    return f"inst_{secrets.token_hex(10)}"


def is_instance_id(text: str) -> bool:
    return re.fullmatch(r"inst_[0-9a-f]{20}", text) is not None


def template_id(seed: Seed | None = None) -> str:
    return f"tmpl_{_bits(seed)}"


def replica_id() -> str:
    return f"repl_{secrets.token_hex(10)}"


def cluster_id() -> str:
    return f"clus_{secrets.token_hex(10)}"


def key_id() -> str:
    return f"key_{secrets.token_hex(10)}"


def execution_id(now: datetime, seed: Seed | None = None) -> str:
    return f"exec_{now:%Y%m%d}_{_bits(seed)}"


def invocation_id(execution_id: str) -> str:
    """The id of the invocation whose first execution this is; unique for each execution."""
    kind, _, rest = execution_id.partition("_")
    if kind != "exec":  # A client's own id, which may be as long as an id can be.
        rest = hashlib.sha256(execution_id.encode()).hexdigest()[:40]
    return f"inv_{rest}"


def webhook_id(seed: Seed | None = None) -> str:
    return f"hook_{_bits(seed)}"


def context_id(seed: Seed | None = None) -> str:
    return f"ctx_{_bits(seed)}"


def api_key() -> str:
    """A new secret: 256 random bits."""
    return f"atoll_{secrets.token_urlsafe(32)}"


def secret() -> str:
    """256 random bits."""
    return secrets.token_hex(32)


def _bits(seed: Seed | None) -> str:
    return secrets.token_hex(10) if seed is None else seed.digest[:20]


def cluster_object_name(identifier: str) -> str:
    """The name of the object in a Kubernetes cluster for an instance or a workspace."""
    # Names of objects have no underscores.
    return f"atoll-{identifier.replace('_', '-')}"
