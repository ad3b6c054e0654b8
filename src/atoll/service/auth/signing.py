"""
Signatures of the service's own tokens: HMAC-SHA256 with a key derived from the database's secret.

Every replica of a database can make and verify them, so no token is stored. A key is derived for
each purpose: a token of one kind is never valid as one of another.
"""

from __future__ import annotations

import base64
import hmac


def derive_key(secret: str, purpose: str) -> bytes:
    return hmac.digest(secret.encode(), purpose.encode(), "sha256")


def base64url(data: bytes) -> str:
    """Without padding."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def from_base64url(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


class Signer:
    def __init__(self, key: bytes, *, hexadecimal: bool = False) -> None:
        """Signatures are base64url, or hexadecimal."""
        self._key = key
        self._hexadecimal = hexadecimal

    def sign(self, data: bytes) -> str:
        digest = hmac.digest(self._key, data, "sha256")
        return digest.hex() if self._hexadecimal else base64url(digest)

    def verifies(self, signature: str, data: bytes) -> bool:
        return signature.isascii() and hmac.compare_digest(self.sign(data), signature)
