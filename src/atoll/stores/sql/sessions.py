"""
Sessions, and with them which instance belongs to whom.

`add` and `save` may be repeated unless they write to the instance too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.errors import Conflict
from atoll.model import plan
from atoll.model.install import Dependency, Install, InstallStatus
from atoll.model.resources import Resources
from atoll.model.session import (
    Cause,
    Durability,
    Holding,
    Session,
    SessionStatus,
    Wanted,
    Warning,
    WorkspaceMode,
)
from atoll.model.volume import VolumeMount
from atoll.stores.sql.events import tell
from atoll.stores.sql.paging import page_of
from atoll.stores.sql.rows import (
    compare_and_set,
    compare_and_set_again,
    decode,
    decode_optional,
    encode,
    encode_optional,
    insert,
    inserted,
    micros,
    moment,
    optional_micros,
    optional_moment,
)

if TYPE_CHECKING:
    from datetime import datetime

    from atoll.model.event import Event
    from atoll.model.page import Page
    from atoll.stores.sql.engine import Connection, Engine, Row

T = TypeVar("T")

_ADD = """
    INSERT INTO sessions (
        id, template_id, status, wanted, runtime_type, runtime_node, cpu, memory, disk,
        max_processes, timeout, created_at, updated_at, expires_at, ended_at, instance_id,
        cause, version, workspace, message, env_vars, capacity, template_version,
        workspace_mode, durability, started_from, install, secrets, volumes, warnings,
        labels, node_labels, auto_start, idle_timeout, archive_after, delete_after, active_at,
        rested_at, failures, retry_at, unsettled_at, timer_at
    ) VALUES (
        :id, :template_id, :status, :wanted, :runtime_type, :runtime_node, :cpu, :memory, :disk,
        :max_processes, :timeout, :created_at, :updated_at, :expires_at, :ended_at, :instance_id,
        :cause, :version, :workspace, :message, :env_vars, :capacity, :template_version,
        :workspace_mode, :durability, :started_from, :install, :secrets, :volumes, :warnings,
        :labels, :node_labels, :auto_start, :idle_timeout, :archive_after, :delete_after,
        :active_at, :rested_at, :failures, :retry_at, :unsettled_at, :timer_at
    )
"""
_GET = "SELECT * FROM sessions WHERE id = :id"
_INSTANCE = "SELECT instance_id FROM sessions WHERE id = :id"
_SAVE = """
    UPDATE sessions SET
        template_id = :template_id, status = :status, wanted = :wanted,
        runtime_type = :runtime_type, runtime_node = :runtime_node, cpu = :cpu,
        memory = :memory, disk = :disk, max_processes = :max_processes, timeout = :timeout,
        created_at = :created_at, updated_at = :updated_at, expires_at = :expires_at,
        ended_at = :ended_at, instance_id = :instance_id, cause = :cause,
        workspace = :workspace, message = :message, env_vars = :env_vars,
        capacity = :capacity, template_version = :template_version,
        workspace_mode = :workspace_mode, durability = :durability, started_from = :started_from,
        install = :install, secrets = :secrets, volumes = :volumes, warnings = :warnings,
        labels = :labels, node_labels = :node_labels, auto_start = :auto_start,
        idle_timeout = :idle_timeout, archive_after = :archive_after,
        delete_after = :delete_after, active_at = :active_at, rested_at = :rested_at,
        failures = :failures, retry_at = :retry_at, unsettled_at = :unsettled_at,
        timer_at = :timer_at,
        version = :version + 1
    WHERE id = :id AND version = :version
"""
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
_COUNT_ON = (
    "SELECT count(*) AS number FROM sessions WHERE runtime_node = :node_id AND status = :status"
)
_COUNT = "SELECT count(*) AS number FROM sessions WHERE status = :status"


class SqlSessions:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def add(self, session: Session, *, event: Event | None = None) -> None:
        row = _row(session)

        def write(connection: Connection) -> None:
            insert(connection, _ADD, row, "Session")
            _own(connection, row)
            tell(connection, event)

        def again(connection: Connection) -> None:
            if not inserted(connection, _GET, row, "Session"):
                write(connection)

        await self._engine.write(write, again=again if row["instance_id"] is None else None)

    async def get(self, session_id: str) -> Session | None:
        def read(connection: Connection) -> Session | None:
            row = connection.execute(_GET, {"id": session_id}).fetchone()
            return None if row is None else _session(row)

        return await self._engine.read(read)

    async def save(self, session: Session, *, event: Event | None = None) -> Session:
        row = _row(session)

        def write(connection: Connection) -> None:
            if not session.status.ended and not _has(connection, row):
                _own(connection, row)
            compare_and_set(connection, _SAVE, row, "Session")
            tell(connection, event)

        def again(connection: Connection) -> None:
            if compare_and_set_again(connection, _SAVE, _GET, row, "Session"):
                tell(connection, event)

        alone = session.status.ended or session.instance_id is None
        await self._engine.write(write, again=again if alone else None)
        return replace(session, version=session.version + 1)

    async def page(
        self,
        *,
        status: SessionStatus | None = None,
        template_id: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[Session]:
        return await self._engine.read(
            page_of(
                "sessions",
                where={"template_id": template_id, "status": status},
                cursor=cursor,
                limit=limit,
                entity=_session,
                rows_at_once=self._engine.rows_at_once,
            )
        )

    async def unsettled(self, now: datetime, *, node_id: str, limit: int) -> list[Session]:
        values = {"now": micros(now), "node_id": node_id, "limit": limit}
        return await self._list(_UNSETTLED, values)

    async def timed_out(self, now: datetime, *, node_id: str, limit: int) -> list[Session]:
        values = {"now": micros(now), "node_id": node_id, "limit": limit}
        return await self._list(_TIMED_OUT, values)

    async def seen(self, session: Session, at: datetime) -> bool:
        session = replace(session, active_at=at)
        row = {
            "id": session.id,
            "version": session.version,
            "at": micros(at),
            "timer_at": optional_micros(plan.timer_at(session)),
        }

        def write(connection: Connection) -> bool:
            return connection.execute(_SEEN, row).rowcount > 0

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
                row["id"]: Holding(row["id"], row["instance_id"], decode_optional(row["workspace"]))
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

    async def _list(self, statement: str, values: dict[str, Any]) -> list[Session]:
        def read(connection: Connection) -> list[Session]:
            return [_session(row) for row in connection.execute(statement, values)]

        return await self._engine.read(read)


def _has(connection: Connection, row: dict[str, Any]) -> bool:
    """Whether it has this instance already, which may be gone since and is nobody else's then."""
    if row["instance_id"] is None:
        return False
    found = connection.execute(_INSTANCE, {"id": row["id"]}).fetchone()
    return found is not None and found["instance_id"] == row["instance_id"]


def _own(connection: Connection, row: dict[str, Any]) -> None:
    if row["instance_id"] is not None and connection.execute(_OWN, row).rowcount == 0:
        raise Conflict(
            f"Session {row['id']} cannot have instance {row['instance_id']}: it is gone, or it "
            "belongs to another session."
        )


def _row(session: Session) -> dict[str, Any]:
    return {
        "id": session.id,
        "template_id": session.template_id,
        "status": session.status.value,
        "wanted": session.wanted.value,
        "runtime_type": session.runtime_type,
        "runtime_node": session.runtime_node,
        "cpu": session.resources.cpu,
        "memory": session.resources.memory,
        "disk": session.resources.disk,
        "max_processes": session.resources.max_processes,
        "timeout": session.timeout,
        "created_at": micros(session.created_at),
        "updated_at": micros(session.updated_at),
        "expires_at": micros(session.expires_at),
        "ended_at": optional_micros(session.ended_at),
        "instance_id": session.instance_id,
        "cause": None if session.cause is None else session.cause.value,
        "version": session.version,
        "workspace": encode_optional(session.workspace),
        "message": encode_optional(session.message),
        "env_vars": encode(session.env_vars),
        "capacity": session.capacity,
        "template_version": session.template_version,
        "workspace_mode": session.workspace_mode.value,
        "durability": session.durability.value,
        "started_from": session.started_from,
        "install": None if session.install is None else encode(_install_row(session.install)),
        "secrets": encode(session.secrets) if session.secrets else None,
        "volumes": encode([_fields(mount) for mount in session.volumes])
        if session.volumes
        else None,
        "warnings": encode([_fields(warning) for warning in session.warnings])
        if session.warnings
        else None,
        "labels": encode(session.labels) if session.labels else None,
        "node_labels": encode(session.node_labels) if session.node_labels else None,
        "auto_start": int(session.auto_start),
        "idle_timeout": session.idle_timeout,
        "archive_after": session.archive_after,
        "delete_after": session.delete_after,
        "active_at": optional_micros(session.active_at),
        "rested_at": optional_micros(session.rested_at),
        "failures": session.failures,
        "retry_at": optional_micros(session.retry_at),
        "unsettled_at": optional_micros(plan.unsettled_at(session)),
        "timer_at": optional_micros(plan.timer_at(session)),
    }


def _fields(item: VolumeMount | Warning | Dependency) -> list[Any]:
    return [getattr(item, name) for name in item.__slots__]


def _install_row(install: Install) -> dict[str, Any]:
    return {
        "dependencies": [_fields(dependency) for dependency in install.dependencies],
        "timeout": install.timeout,
        "fail_on_error": install.fail_on_error,
        "allow_conflicts": install.allow_conflicts,
        "status": install.status.value,
        "environment": install.environment,
        "installed": install.installed,
        "message": install.message,
    }


def _install(text: str | None) -> Install | None:
    if text is None:
        return None
    row = decode(text)
    return Install(
        **{
            **row,
            "dependencies": tuple(Dependency(*item) for item in row["dependencies"]),
            "status": InstallStatus(row["status"]),
            "installed": tuple(row["installed"]),
        }
    )


def _tuple(text: str | None, kind: type[T]) -> tuple[T, ...]:
    return () if text is None else tuple(kind(*item) for item in decode(text))


def _session(row: Row) -> Session:
    return Session(
        id=row["id"],
        template_id=row["template_id"],
        status=SessionStatus(row["status"]),
        wanted=Wanted(row["wanted"]),
        runtime_type=row["runtime_type"],
        runtime_node=row["runtime_node"],
        resources=Resources(row["cpu"], row["memory"], row["disk"], row["max_processes"]),
        timeout=row["timeout"],
        created_at=moment(row["created_at"]),
        updated_at=moment(row["updated_at"]),
        expires_at=moment(row["expires_at"]),
        env_vars=decode(row["env_vars"]),
        instance_id=row["instance_id"],
        workspace=decode_optional(row["workspace"]),
        ended_at=optional_moment(row["ended_at"]),
        cause=None if row["cause"] is None else Cause(row["cause"]),
        message=decode_optional(row["message"]),
        capacity=row["capacity"],
        template_version=row["template_version"],
        workspace_mode=WorkspaceMode(row["workspace_mode"]),
        durability=Durability(row["durability"]),
        started_from=row["started_from"],
        install=_install(row["install"]),
        secrets=decode_optional(row["secrets"]) or {},
        volumes=_tuple(row["volumes"], VolumeMount),
        warnings=_tuple(row["warnings"], Warning),
        labels=decode_optional(row["labels"]) or {},
        node_labels=decode_optional(row["node_labels"]) or {},
        auto_start=bool(row["auto_start"]),
        idle_timeout=row["idle_timeout"],
        archive_after=row["archive_after"],
        delete_after=row["delete_after"],
        active_at=optional_moment(row["active_at"]),
        rested_at=optional_moment(row["rested_at"]),
        failures=row["failures"],
        retry_at=optional_moment(row["retry_at"]),
        version=row["version"],
    )
