"""API keys. Their secrets are never stored."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class Scope(StrEnum):
    FULL = "full"
    READ = "read"


@dataclass(frozen=True, slots=True)
class ApiKey:
    id: str
    name: str
    digest: bytes
    scope: Scope
    created_at: datetime


def digest(secret: str) -> bytes:
    """
    The stored form of a secret. A secret has 256 random bits, so one round of SHA-256 suffices.
    """
    return hashlib.sha256(secret.encode()).digest()
