"""
Secrets of sessions: write-only, and encrypted in the database.

A secret is an environment variable of everything that runs in its session. Its stored value is
encrypted for the session and the name, and goes to the executor over the link with each execution;
it is never part of a command line, an answer or a log. Code in the session can print it, of course.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from atoll.errors import InvalidRequest, NotFound, PermanentError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from atoll.model.session import Session
    from atoll.service.auth.encryption import Encryption
    from atoll.service.sessions.core import SessionCore

MAX_SECRET = 64 * 1024
"""Bytes of one secret; the kernel takes no more than 128 KiB as one variable."""
MAX_SECRETS = 256
MAX_ALL = 1024 * 1024
"""Bytes of all secrets of a session: with 2 MiB of variables the kernel starts no program."""


class Secrets:
    def __init__(self, encryption: Encryption) -> None:
        self._encryption = encryption

    async def prepare(self, session: Session) -> None:
        """To be awaited before `reveal`: the cipher is loaded in a thread."""
        if session.secrets:
            await asyncio.to_thread(self._encryption.prepare)

    async def seal(self, session: Session, values: Mapping[str, str]) -> Session:
        """The session with these secrets added, encrypted for it alone."""
        if not values:
            return session
        for name, value in values.items():
            if len(value.encode("utf-8", "surrogatepass")) > MAX_SECRET:
                raise InvalidRequest(
                    f"secrets.{name}: at most {MAX_SECRET} bytes.", field=f"secrets.{name}"
                )
            if name in session.env_vars:
                raise InvalidRequest(
                    f"secrets.{name}: env_vars has a variable of the same name. Remove one.",
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
                f"secrets: at most {MAX_SECRETS} secrets with {MAX_ALL} bytes in all.",
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
                f"Secret {name} of session {session_id} cannot be decrypted: it was encrypted with "
                "another key, or the database was changed. Restore the key (secrets.old_keys), or "
                "set the secret again.",
                code="secret_unreadable",
            )
        return value


class SessionSecrets:
    """The verbs of the API. A change takes effect with the next execution."""

    def __init__(self, core: SessionCore, secrets: Secrets) -> None:
        self._clock = core.replica.clock
        self._records = core.records
        self._connections = core.connections
        self._secrets = secrets

    async def names(self, session_id: str) -> list[str]:
        return sorted((await self._records.get(session_id)).secrets)

    async def put(self, session_id: str, name: str, value: str) -> list[str]:
        async def apply(session: Session) -> Session:
            return self._updated(await self._secrets.seal(session, {name: value}))

        return await self._change(session_id, apply)

    async def remove(self, session_id: str, name: str) -> list[str]:
        async def apply(session: Session) -> Session:
            if name not in session.secrets:
                raise NotFound(
                    f"Session {session_id} has no secret {name}.", code="secret_not_found"
                )
            left = {other: text for other, text in session.secrets.items() if other != name}
            return self._updated(dataclasses.replace(session, secrets=left))

        return await self._change(session_id, apply)

    def _updated(self, session: Session) -> Session:
        return dataclasses.replace(session, updated_at=self._clock.now())

    async def _change(
        self, session_id: str, apply: Callable[[Session], Awaitable[Session]]
    ) -> list[str]:
        session = await self._records.change(session_id, apply)
        await self._connections.announce(session)
        return sorted(session.secrets)


def _about(session_id: str, name: str) -> str:
    return f"atoll session secret\n{session_id}\n{name}"
