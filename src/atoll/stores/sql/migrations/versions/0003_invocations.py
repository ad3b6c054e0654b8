"""Invocations, attempts, displays of contexts, and sessions with a capacity above one."""

from __future__ import annotations

import sqlalchemy as sa

from atoll.stores.sql.migrations import steps
from atoll.stores.sql.migrations.steps import BYTES, ID, JSON

revision = "0003"
down_revision = "0002"


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
