"""Invocations, attempts, displays of contexts, and sessions with a capacity above one."""

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
JSON = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
BYTES = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


def upgrade() -> None:
    steps.add_column(
        "sessions", sa.Column("capacity", sa.Integer, nullable=False, server_default=sa.text("1"))
    )
    steps.add_column("executions", sa.Column("invocation_id", ID))
    steps.add_column("executions", sa.Column("attempts", JSON))
    steps.add_column("executions", sa.Column("results_json", BYTES))
    steps.add_column(
        "executions",
        sa.Column("ordinal", sa.BigInteger, nullable=False, server_default=sa.text("1")),
    )
    steps.add_column(
        "executions",
        sa.Column("superseded", sa.Integer, nullable=False, server_default=sa.text("0")),
    )
    steps.add_column("executions", sa.Column("invoked_at", sa.BigInteger))
    steps.create_index(
        "executions_invocation", "executions", ["invocation_id", "ordinal"], unique=True
    )


def downgrade() -> None:
    steps.drop_index("executions_invocation", "executions")
    for name in ("invoked_at", "superseded", "ordinal"):
        steps.drop_column("executions", name)
    steps.drop_column("executions", "results_json")
    steps.drop_column("executions", "attempts")
    steps.drop_column("executions", "invocation_id")
    steps.drop_column("sessions", "capacity")
