"""
Encrypts small texts that are stored: AES-256-GCM with associated data.

A ciphertext is bound to its `context`: one that was copied to another row or name cannot be
decrypted there. The first key encrypts and every key decrypts, so keys can be rotated. Keys and
library are loaded at the first use, because most servers never need them.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
from typing import TYPE_CHECKING

from atoll.errors import InvalidRequest, PermanentError
from atoll.settings import KEY_BYTES, parse_key

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES = 12
VERSION = "1:"


class Encryption:
    def __init__(self, keys: Sequence[str] = (), file: Path | None = None) -> None:
        """Without `keys`, the key in `file` is used, which is made when it is first needed."""
        self._given = tuple(keys)
        self._file = file
        self._keys: tuple[AESGCM, ...] | None = None

    def __repr__(self) -> str:
        return "<Encryption>"

    def prepare(self) -> None:
        """Load what `open` needs. Blocking, for some milliseconds."""
        if self._keys is None:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            texts = self._given or self._from_file()
            if texts:
                self._keys = tuple(AESGCM(parse_key(text)) for text in texts)

    def prepare_to_seal(self) -> None:
        """Load what `seal` needs; makes the key file if it is missing."""
        if not self._given:
            if self._file is None:
                raise InvalidRequest(
                    "Cannot store secrets: no encryption key is configured. Set ATOLL_SECRETS__KEY "
                    "on every replica of this database.",
                    code="secrets_not_configured",
                    setting="secrets.key",
                )
            if self._keys is None:
                _make_key_file(self._file)
        self.prepare()

    def seal(self, text: str, context: str) -> str:
        self.prepare_to_seal()
        assert self._keys is not None
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed = self._keys[0].encrypt(
            nonce, text.encode("utf-8", "surrogatepass"), context.encode()
        )
        return VERSION + base64.b64encode(nonce + sealed).decode()

    def open(self, sealed: str, context: str) -> str | None:
        """Null if no key decrypts the text in this context."""
        from cryptography.exceptions import InvalidTag

        self.prepare()
        try:
            data = base64.b64decode(sealed.removeprefix(VERSION), validate=True)
        except ValueError:
            return None
        for key in self._keys or ():
            with contextlib.suppress(InvalidTag, ValueError):
                plain = key.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], context.encode())
                return plain.decode("utf-8", "surrogatepass")
        return None

    def _from_file(self) -> tuple[str, ...]:
        if self._file is None:
            return ()
        try:
            text = self._file.read_text().strip()
            parse_key(text)
        except FileNotFoundError:
            return ()
        except ValueError:
            raise PermanentError(
                f"{self._file} does not contain a key. Restore the right file.",
                code="secret_unreadable",
            ) from None
        return (text,)


def _make_key_file(path: Path) -> None:
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w") as file:
            file.write(base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode() + "\n")
            file.flush()
            # Ciphertexts of this key may be on the disk soon.
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # Unlike a rename, never replaces the key of another process.
    finally:
        temporary.unlink()
