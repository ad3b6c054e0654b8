"""Holders of executions, large parts in the blob store, and requests with an idempotency key."""

from __future__ import annotations

import sqlalchemy as sa

from atoll.stores.sql.migrations import steps
from atoll.stores.sql.migrations.steps import BYTES, ID, JSON, NAME, TIME

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    steps.add_column("executions", sa.Column("holder", ID))
    steps.add_column("executions", sa.Column("kept", JSON))
    steps.create_index(
        "executions_session_status", "executions", ["session_id", "status", "created_at", "id"]
    )
    steps.add_column("instances", sa.Column("holder", ID))
    steps.create_table(
        "keyed_requests",
        sa.Column("id", ID, primary_key=True),
        sa.Column("holder", ID, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("expires_at", TIME, nullable=False),
        sa.Column("fingerprint", ID),
        sa.Column("status", sa.Integer),
        sa.Column("kept", NAME),
        sa.Column("headers", JSON),
        sa.Column("body", BYTES),
    )
    steps.create_index("keyed_requests_expires", "keyed_requests", ["expires_at"])
    steps.create_table(
        "properties",
        sa.Column("name", ID, primary_key=True),
        sa.Column("value", NAME, nullable=False),
    )


def downgrade() -> None:
    steps.drop_table("properties")
    steps.drop_table("keyed_requests")
    steps.drop_column("instances", "holder")
    steps.drop_index("executions_session_status", "executions")
    steps.drop_column("executions", "kept")
    steps.drop_column("executions", "holder")
