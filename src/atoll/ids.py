"""
Ids: a word that says what it names, and 80 random bits. An execution's carries its day as well.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime


def session_id() -> str:
    return f"sess_{secrets.token_hex(10)}"


def instance_id() -> str:
    return f"inst_{secrets.token_hex(10)}"


def template_id() -> str:
    return f"tmpl_{secrets.token_hex(10)}"


def replica_id() -> str:
    return f"repl_{secrets.token_hex(10)}"


def cluster_id() -> str:
    return f"clus_{secrets.token_hex(10)}"


def key_id() -> str:
    return f"key_{secrets.token_hex(10)}"


def execution_id(now: datetime) -> str:
    return f"exec_{now:%Y%m%d}_{secrets.token_hex(10)}"


def api_key() -> str:
    """A new secret: 256 random bits."""
    return f"atoll_{secrets.token_urlsafe(32)}"
