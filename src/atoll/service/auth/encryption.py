"""
Encryption of small texts where they are stored: AES-256-GCM, bound to what they are about.

A sealed text opens only for the same `about`, so one that was moved to another row or another name
does not open there. The first key seals; every key opens, so that a key can be replaced while what
it sealed is still there. The keys and the library are read when the first text is sealed or opened,
and not before: most servers never need them.
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
        """Without keys, the one in `file`, which is made when it is first needed to seal."""
        self._given = tuple(keys)
        self._file = file
        self._keys: tuple[AESGCM, ...] | None = None

    def __repr__(self) -> str:
        return "<Sealing>"

    def prepare(self) -> None:
        """Read what is needed to open; it may take some milliseconds."""
        if self._keys is None:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            texts = self._given or self._from_file()
            if texts:
                self._keys = tuple(AESGCM(parse_key(text)) for text in texts)

    def prepare_to_seal(self) -> None:
        """Like `prepare`; makes the key file where there is to be one and is none."""
        if not self._given:
            if self._file is None:
                raise InvalidRequest(
                    "Secrets cannot be kept here: no key is set to encrypt them with. Set "
                    "ATOLL_SECRETS__KEY on every control plane of this database.",
                    code="secrets_not_configured",
                    setting="secrets.key",
                )
            if self._keys is None:
                _make_key_file(self._file)
        self.prepare()

    def seal(self, text: str, about: str) -> str:
        self.prepare_to_seal()
        assert self._keys is not None
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed = self._keys[0].encrypt(nonce, text.encode("utf-8", "surrogatepass"), about.encode())
        return VERSION + base64.b64encode(nonce + sealed).decode()

    def open(self, sealed: str, about: str) -> str | None:
        """None when no key opens it for this."""
        from cryptography.exceptions import InvalidTag

        self.prepare()
        try:
            data = base64.b64decode(sealed.removeprefix(VERSION), validate=True)
        except ValueError:
            return None
        for key in self._keys or ():
            with contextlib.suppress(InvalidTag, ValueError):
                plain = key.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], about.encode())
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
                f"{self._file} does not hold a key: put the right one back.",
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
            # What is sealed with it may be on the disk soon.
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # Unlike a rename, it never replaces the key of another start.
    finally:
        temporary.unlink()
