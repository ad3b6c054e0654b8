"""
Sessions, and which instance belongs to which session.

`add` and `save` are not repeatable when they write to the instance as well.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from atoll.errors import InstanceTaken
from atoll.model import plan
from atoll.model.session import Holding, Session, SessionStatus
from atoll.stores.sql import tables
from atoll.stores.sql.json_codec import decode, encode, micros
from atoll.stores.sql.mapper import Mapper, Special, Values
from atoll.stores.sql.records import Records

if TYPE_CHECKING:
    from datetime import datetime

    from atoll.model.event import Event
    from atoll.model.page import Page
    from atoll.stores.sql.engine import Connection, Row


def _due(session: Session) -> Values:
    """What `model.plan` derives from a session, so that sweeps can find it by an index."""
    unsettled, timer = plan.unsettled_at(session), plan.timer_at(session)
    return {
        "unsettled_at": None if unsettled is None else micros(unsettled),
        "timer_at": None if timer is None else micros(timer),
    }


MAPPER = Mapper(
    Session, tables.SESSIONS, special=Special(columns={"unsettled_at", "timer_at"}, write=_due)
)
_CURRENT = "SELECT instance_id, version FROM sessions WHERE id = :id"
_OWN = """
    UPDATE instances SET session_id = :id
    WHERE id = :instance_id AND (session_id IS NULL OR session_id = :id)
"""
_UNENDED = ", ".join(f"'{status}'" for status in SessionStatus if not status.ended)
_UNSETTLED = """
    SELECT * FROM sessions WHERE runtime_node = :node_id AND unsettled_at <= :now
    ORDER BY unsettled_at LIMIT :limit
"""
_TIMED_OUT = """
    SELECT * FROM sessions WHERE runtime_node = :node_id AND timer_at <= :now
    ORDER BY timer_at LIMIT :limit
"""
_UNFINISHED = f"""
    SELECT * FROM sessions
    WHERE status IN ({_UNENDED}) AND id > :after ORDER BY id LIMIT :limit
"""  # noqa: S608 - words of ours
_ON_NODE = f"""
    SELECT * FROM sessions
    WHERE runtime_node = :node_id AND status IN ({_UNENDED}) AND id > :after
    ORDER BY id LIMIT :limit
"""  # noqa: S608 - words of ours
_HOLDINGS = f"""
    SELECT id, instance_id, workspace FROM sessions
    WHERE runtime_node = :node_id AND status IN ({_UNENDED}) AND id > :after
    ORDER BY id LIMIT :limit
"""  # noqa: S608 - words of ours
_UNSETTLED_HOLDINGS = """
    SELECT id, instance_id, workspace FROM sessions
    WHERE runtime_node = :node_id AND unsettled_at IS NOT NULL AND id > :after
    ORDER BY id LIMIT :limit
"""
_SEEN = """
    UPDATE sessions SET active_at = :at, timer_at = :timer_at
    WHERE id = :id AND version = :version
"""
_EXPLAINED = """
    UPDATE sessions SET message = :message WHERE id = :id AND version = :version
"""
_COUNT_ON = (
    "SELECT count(*) AS number FROM sessions WHERE runtime_node = :node_id AND status = :status"
)
_COUNT = "SELECT count(*) AS number FROM sessions WHERE status = :status"


class SqlSessions(Records[Session]):
    mapper = MAPPER
    noun = "Session"

    async def add(self, session: Session, *, event: Event | None = None) -> None:
        first = None if session.instance_id is None else partial(_own, session)
        await self._add(session, event, first)

    async def save(self, session: Session, *, event: Event | None = None) -> Session:
        alone = session.status.ended or session.instance_id is None
        first = None if alone else partial(_own_unless_owned, session)
        return await self._save(session, event, first)

    async def page(
        self,
        *,
        status: SessionStatus | None = None,
        template_id: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[Session]:
        where = {"template_id": template_id, "status": status}
        return await self._page(cursor, limit, where)

    async def unsettled(self, now: datetime, *, node_id: str, limit: int) -> list[Session]:
        values = {"now": micros(now), "node_id": node_id, "limit": limit}
        return await self._list(_UNSETTLED, values)

    async def timed_out(self, now: datetime, *, node_id: str, limit: int) -> list[Session]:
        values = {"now": micros(now), "node_id": node_id, "limit": limit}
        return await self._list(_TIMED_OUT, values)

    async def touch(self, session: Session, at: datetime) -> bool:
        row = {
            "id": session.id,
            "version": session.version,
            "at": micros(at),
            **_due(replace(session, active_at=at)),
        }

        def write(connection: Connection) -> bool:
            return connection.execute(_SEEN, row).rowcount > 0

        return await self._engine.write(write, again=write)

    async def explain(self, session: Session, message: str) -> bool:
        row = {"id": session.id, "version": session.version, "message": encode(message)}

        def write(connection: Connection) -> bool:
            return connection.execute(_EXPLAINED, row).rowcount > 0

        return await self._engine.write(write, again=write)

    async def unfinished(
        self, *, limit: int, after: str = "", node_id: str | None = None
    ) -> list[Session]:
        values = {"after": after, "limit": limit}
        if node_id is None:
            return await self._list(_UNFINISHED, values)
        return await self._list(_ON_NODE, {**values, "node_id": node_id})

    async def holdings(self, node_id: str, *, limit: int, after: str = "") -> list[Holding]:
        values = {"node_id": node_id, "limit": limit, "after": after}

        def read(connection: Connection) -> list[Holding]:
            found = {
                row["id"]: _holding(row)
                for statement in (_HOLDINGS, _UNSETTLED_HOLDINGS)
                for row in connection.execute(statement, values)
            }
            return [found[key] for key in sorted(found)[:limit]]

        return await self._engine.read(read)

    async def count(self, status: SessionStatus, *, node_id: str | None = None) -> int:
        values = {"status": status.value, "node_id": node_id}
        statement = _COUNT if node_id is None else _COUNT_ON

        def read(connection: Connection) -> int:
            (row,) = connection.execute(statement, values)
            return int(row["number"])

        return await self._engine.read(read)


def _holding(row: Row) -> Holding:
    workspace = row["workspace"]
    return Holding(row["id"], row["instance_id"], None if workspace is None else decode(workspace))


def _own_unless_owned(session: Session, connection: Connection) -> None:
    found = connection.execute(_CURRENT, {"id": session.id}).fetchone()
    if found is None or found["version"] != session.version:
        return  # The compare-and-set is going to refuse it.
    # An instance that the session has already may have been removed meanwhile.
    if found["instance_id"] != session.instance_id:
        _own(session, connection)


def _own(session: Session, connection: Connection) -> None:
    row = {"id": session.id, "instance_id": session.instance_id}
    if connection.execute(_OWN, row).rowcount == 0:
        raise InstanceTaken(
            f"Session {session.id} cannot have instance {session.instance_id}: it is gone, or it "
            "belongs to another session."
        )
