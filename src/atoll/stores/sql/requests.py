"""
Requests with an idempotency key, and their answers.

`answer` may be repeated. The others may not: a second attempt cannot tell what its first did from
what another request of the same holder did.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict
from atoll.model.keyed import KeyedRequest
from atoll.stores.sql.rows import decode, encode, insert, micros, moment

if TYPE_CHECKING:
    from datetime import datetime

    from atoll.stores.sql.engine import Connection, Engine, Row

_ADD = """
    INSERT INTO keyed_requests (
        id, holder, created_at, expires_at, fingerprint, status, kept, headers, body
    ) VALUES (
        :id, :holder, :created_at, :expires_at, :fingerprint, :status, :kept, :headers, :body
    )
"""
_GET = "SELECT * FROM keyed_requests WHERE id = :id"
_DROP_EXPIRED = "DELETE FROM keyed_requests WHERE id = :id AND expires_at <= :created_at"
_TAKE_OVER = """
    UPDATE keyed_requests SET holder = :new_holder, fingerprint = :fingerprint
    WHERE id = :id AND holder = :holder AND status IS NULL
"""
_ANSWER = """
    UPDATE keyed_requests SET
        fingerprint = :fingerprint, status = :status, kept = :kept, headers = :headers, body = :body
    WHERE id = :id AND holder = :holder AND status IS NULL
"""
_FORGET = "DELETE FROM keyed_requests WHERE id = :id AND holder = :holder AND status IS NULL"
_EXPIRED = """
    SELECT id, holder, created_at, expires_at, fingerprint, status, kept FROM keyed_requests
    WHERE expires_at <= :now ORDER BY expires_at LIMIT :limit
"""
_REMOVE = "DELETE FROM keyed_requests WHERE id = :id AND expires_at <= :now"


class SqlKeyedRequests:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def claim(self, request: KeyedRequest) -> KeyedRequest | None:
        row = _row(request)

        def write(connection: Connection) -> KeyedRequest | None:
            connection.execute(_DROP_EXPIRED, row)
            found = connection.execute(_GET, row).fetchone()
            if found is not None:
                return _request(found)
            insert(connection, _ADD, row, "Request")
            return None

        while True:
            try:
                return await self._engine.write(write)
            except Conflict:
                continue  # Another replica came between the look and the insert: look again.

    async def take_over(self, request: KeyedRequest, holder: str) -> bool:
        values = {
            "id": request.id,
            "holder": request.holder,
            "new_holder": holder,
            "fingerprint": request.fingerprint,
        }
        return await self._engine.write(
            lambda connection: connection.execute(_TAKE_OVER, values).rowcount > 0
        )

    async def answer(self, request: KeyedRequest) -> bool:
        row = _row(request)

        def write(connection: Connection) -> bool:
            return connection.execute(_ANSWER, row).rowcount > 0

        def again(connection: Connection) -> bool:
            return write(connection) or _answered(connection.execute(_GET, row).fetchone(), row)

        return await self._engine.write(write, again=again)

    async def forget(self, request_id: str, holder: str) -> None:
        values = {"id": request_id, "holder": holder}
        await self._engine.write(lambda connection: connection.execute(_FORGET, values).rowcount)

    async def expire(self, now: datetime, *, limit: int) -> list[KeyedRequest]:
        values = {"now": micros(now), "limit": limit}

        def write(connection: Connection) -> list[KeyedRequest]:
            removed = []
            for row in connection.execute(_EXPIRED, values).fetchall():
                gone = {"id": row["id"], "now": values["now"]}
                if connection.execute(_REMOVE, gone).rowcount:
                    removed.append(_without_body(row))
            return removed

        return await self._engine.write(write)


def _row(request: KeyedRequest) -> dict[str, Any]:
    return {
        "id": request.id,
        "holder": request.holder,
        "created_at": micros(request.created_at),
        "expires_at": micros(request.expires_at),
        "fingerprint": request.fingerprint,
        "status": request.status,
        "kept": request.kept,
        "headers": encode(request.headers),
        "body": request.body,
    }


def _answered(found: Row | None, row: dict[str, Any]) -> bool:
    """Whether the answer that is there is this one."""
    names = ("holder", "fingerprint", "status", "kept", "headers", "body")
    return found is not None and all(found[name] == row[name] for name in names)


def _without_body(row: Row) -> KeyedRequest:
    return KeyedRequest(
        id=row["id"],
        holder=row["holder"],
        created_at=moment(row["created_at"]),
        expires_at=moment(row["expires_at"]),
        fingerprint=row["fingerprint"],
        status=row["status"],
        kept=row["kept"],
    )


def _request(row: Row) -> KeyedRequest:
    return replace(_without_body(row), headers=decode(row["headers"]), body=row["body"])
