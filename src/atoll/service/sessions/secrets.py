"""
Secrets of sessions: write-only, encrypted where they are stored.

A secret is an environment variable of everything that runs in its session. Its value is in the
database only as `sealing` wrote it, bound to the session and the name, and goes to the executor
over the link with each request to run something; nowhere is it part of a command line, an answer or
a log. What the code inside does with it is its own affair, and ends up where its output does.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from atoll.errors import Conflict, InvalidRequest, NotFound, PermanentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.clock import Clock
    from atoll.model.session import Session
    from atoll.service.auth.encryption import Encryption
    from atoll.service.sessions.connections import Connections
    from atoll.stores.base import Store

MAX_SECRET = 64 * 1024
"""Bytes of one secret; the kernel takes no more than 128 KiB as one variable."""
MAX_SECRETS = 256
MAX_ALL = 1024 * 1024
"""Bytes of all secrets of a session: with 2 MiB of variables the kernel starts no program."""


class Secrets:
    def __init__(self, encryption: Encryption) -> None:
        self._encryption = encryption

    async def ready(self, session: Session) -> None:
        """Before `reveal`: what takes time the first time is done in a thread."""
        if session.secrets:
            await asyncio.to_thread(self._encryption.prepare)

    async def seal(self, session: Session, values: Mapping[str, str]) -> Session:
        """The session with these secrets too, encrypted for it alone."""
        if not values:
            return session
        for name, value in values.items():
            if len(value.encode("utf-8", "surrogatepass")) > MAX_SECRET:
                raise InvalidRequest(
                    f"secrets.{name}: at most {MAX_SECRET} bytes.", field=f"secrets.{name}"
                )
            if name in session.env_vars:
                raise InvalidRequest(
                    f"secrets.{name}: env_vars has a variable of this name; give one of the two.",
                    field=f"secrets.{name}",
                )
        await asyncio.to_thread(self._encryption.prepare_to_seal)
        sealed = {
            name: self._encryption.seal(value, _about(session.id, name))
            for name, value in values.items()
        }
        found = {**session.secrets, **sealed}
        # The cipher adds some bytes to each, and base64 a third to all.
        if len(found) > MAX_SECRETS or sum(map(len, found.values())) > MAX_ALL * 4 // 3:
            raise InvalidRequest(
                f"secrets: at most {MAX_SECRETS} of them, and {MAX_ALL} bytes together.",
                field="secrets",
            )
        return dataclasses.replace(session, secrets=found)

    def reveal(self, session: Session) -> dict[str, str]:
        """Raises `PermanentError` with code `secret_unreadable`."""
        return {name: self._open(session.id, name, text) for name, text in session.secrets.items()}

    def _open(self, session_id: str, name: str, sealed: str) -> str:
        value = self._encryption.open(sealed, _about(session_id, name))
        if value is None:
            raise PermanentError(
                f"Secret {name} of session {session_id} cannot be read: it was encrypted with "
                "another key, or has been changed. Bring the key back (secrets.old_keys), or set "
                "the secret anew.",
                code="secret_unreadable",
            )
        return value


class SessionSecrets:
    """The verbs: each is a compare-and-set of the session, and counts for what is run next."""

    def __init__(
        self, store: Store, connections: Connections, secrets: Secrets, clock: Clock
    ) -> None:
        self._store = store
        self._connections = connections
        self._secrets = secrets
        self._clock = clock

    async def names(self, session_id: str) -> list[str]:
        return sorted((await self._connections.session(session_id)).secrets)

    async def put(self, session_id: str, name: str, value: str) -> list[str]:
        while True:
            session = await self._connections.usable(session_id)
            try:
                return await self._save(await self._secrets.seal(session, {name: value}))
            except Conflict:
                continue  # It moved on meanwhile; once more on what it is now.

    async def remove(self, session_id: str, name: str) -> list[str]:
        while True:
            session = await self._connections.usable(session_id)
            if name not in session.secrets:
                raise NotFound(
                    f"Session {session_id} has no secret {name}.", code="secret_not_found"
                )
            left = {other: text for other, text in session.secrets.items() if other != name}
            try:
                return await self._save(dataclasses.replace(session, secrets=left))
            except Conflict:
                continue

    async def _save(self, session: Session) -> list[str]:
        session = await self._store.sessions.save(
            dataclasses.replace(session, updated_at=self._clock.now())
        )
        await self._connections.announce(session)
        return sorted(session.secrets)


def _about(session_id: str, name: str) -> str:
    return f"atoll session secret\n{session_id}\n{name}"
