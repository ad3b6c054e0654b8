"""Wanted states and timers of sessions, nodes, events, webhooks, and sizes of warm pools."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from atoll.stores.sql.migrations import steps
from atoll.stores.sql.migrations.steps import COUNTED, ID, JSON, NAME, TIME, WORD

revision = "0005"
down_revision = "0004"


def session_columns() -> list[sa.Column[Any]]:
    """New ones each time: a column belongs to one table."""
    return [
        sa.Column("labels", JSON),
        sa.Column("node_labels", JSON),
        sa.Column("auto_start", sa.Integer, nullable=False, server_default=sa.text("1")),
        sa.Column("idle_timeout", sa.BigInteger),
        sa.Column("archive_after", sa.BigInteger),
        sa.Column("delete_after", sa.BigInteger),
        sa.Column("active_at", TIME),
        sa.Column("rested_at", TIME),
        sa.Column("failures", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("retry_at", TIME),
        sa.Column("unsettled_at", TIME),
        sa.Column("timer_at", TIME),
    ]


def upgrade() -> None:
    for column in session_columns():
        steps.add_column("sessions", column)
    op.execute("UPDATE sessions SET timer_at = expires_at WHERE status IN ('creating', 'running')")
    op.execute(
        "UPDATE sessions SET instance_id = NULL, workspace = NULL "
        "WHERE status NOT IN ('creating', 'running')"
    )
    steps.create_index("sessions_unsettled", "sessions", ["runtime_node", "unsettled_at"])
    steps.create_index("sessions_timer", "sessions", ["runtime_node", "timer_at"])
    steps.create_index("sessions_node", "sessions", ["runtime_node", "status", "id"])
    steps.drop_index("sessions_expires", "sessions")
    steps.add_column("templates", sa.Column("pool_max", sa.Integer))
    steps.add_column("checkpoints", sa.Column("backups", JSON))
    steps.create_table(
        "nodes",
        sa.Column("id", NAME, primary_key=True),
        sa.Column("type", NAME, nullable=False),
        sa.Column("seen_at", TIME),
        sa.Column("told", JSON, nullable=False),
        sa.Column("status", WORD, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("problem", JSON),
        sa.Column("cordoned", sa.Integer, nullable=False),
        sa.Column("drain", JSON),
    )
    steps.create_table(
        "events",
        sa.Column("id", COUNTED, primary_key=True, autoincrement=True),
        sa.Column("number", sa.BigInteger),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("type", NAME, nullable=False),
        sa.Column("subject", ID, nullable=False),
        sa.Column("data", JSON, nullable=False),
    )
    steps.create_index("events_number", "events", ["number"], unique=True)
    steps.create_table(
        "webhooks",
        sa.Column("id", ID, primary_key=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("url", JSON, nullable=False),
        sa.Column("secret", JSON, nullable=False),
        sa.Column("types", JSON, nullable=False),
        sa.Column("delivered", sa.BigInteger, nullable=False),
        sa.Column("state", JSON),
        sa.Column("version", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    for name in ("webhooks", "events", "nodes"):
        steps.drop_table(name)
    steps.drop_column("checkpoints", "backups")
    steps.drop_column("templates", "pool_max")
    steps.create_index("sessions_expires", "sessions", ["status", "expires_at", "id"])
    for name in ("sessions_node", "sessions_timer", "sessions_unsettled"):
        steps.drop_index(name, "sessions")
    for column in reversed(session_columns()):
        steps.drop_column("sessions", column.name)
