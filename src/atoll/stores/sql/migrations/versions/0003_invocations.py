"""Invocations, attempts, what contexts showed, and sessions that run several things at once."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from atoll.stores.sql.migrations import steps

revision = "0003"
down_revision = "0002"


def words(length: int) -> sa.String:
    """Text that compares by its bytes everywhere, as it does in SQLite."""
    return (
        sa.String(length)
        .with_variant(mysql.VARCHAR(length, collation="utf8mb4_nopad_bin"), "mysql", "mariadb")
        .with_variant(sa.String(length, collation="C"), "postgresql")
    )


ID = words(64)
WORD = words(32)
TIME = sa.BigInteger()
JSON = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
BYTES = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


def upgrade() -> None:
    steps.add_column(
        "sessions", sa.Column("capacity", sa.Integer, nullable=False, server_default=sa.text("1"))
    )
    steps.add_column("executions", sa.Column("invocation_id", ID))
    steps.add_column("executions", sa.Column("attempts", JSON))
    steps.add_column("executions", sa.Column("results_json", BYTES))
    steps.create_index("executions_invocation", "executions", ["invocation_id", "created_at", "id"])
    steps.create_table(
        "invocations",
        sa.Column("id", ID, primary_key=True),
        sa.Column("session_id", ID, nullable=False),
        sa.Column("execution_id", ID, nullable=False),
        sa.Column("mode", WORD, nullable=False),
        sa.Column("status", WORD, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("completed_at", TIME),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("function_name", JSON),
        sa.Column("metadata", JSON, nullable=False),
    )
    steps.create_index("invocations_created", "invocations", ["created_at", "id"])
    steps.create_index("invocations_status", "invocations", ["status", "created_at", "id"])
    steps.create_index("invocations_session", "invocations", ["session_id", "created_at", "id"])
    steps.create_index(
        "invocations_session_status", "invocations", ["session_id", "status", "created_at", "id"]
    )


def downgrade() -> None:
    steps.drop_table("invocations")
    steps.drop_index("executions_invocation", "executions")
    steps.drop_column("executions", "results_json")
    steps.drop_column("executions", "attempts")
    steps.drop_column("executions", "invocation_id")
    steps.drop_column("sessions", "capacity")
