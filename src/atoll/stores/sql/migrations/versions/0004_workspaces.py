"""Checkpoints, volumes, versions of templates, and packages, secrets and volumes of sessions."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from atoll.stores.sql.migrations import steps
from atoll.stores.sql.migrations.steps import ID, JSON, NAME, WORD

revision = "0004"
down_revision = "0003"


def session_columns() -> list[sa.Column[Any]]:
    """New ones each time: a column belongs to one table."""
    return [
        sa.Column("template_version", sa.Integer, nullable=False, server_default=sa.text("1")),
        sa.Column("workspace_mode", WORD, nullable=False, server_default=sa.text("'sync'")),
        sa.Column("durability", WORD, nullable=False, server_default=sa.text("'background'")),
        sa.Column("started_from", ID),
        sa.Column("install", JSON),
        sa.Column("secrets", JSON),
        sa.Column("volumes", JSON),
        sa.Column("warnings", JSON),
    ]


def template_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("number", sa.Integer, nullable=False, server_default=sa.text("1")),
        sa.Column("status", WORD, nullable=False, server_default=sa.text("'ready'")),
        sa.Column("build", JSON),
    ]


def upgrade() -> None:
    for column in session_columns():
        steps.add_column("sessions", column)
    for column in template_columns():
        steps.add_column("templates", column)
    steps.create_index("templates_status", "templates", ["status", "id"])
    steps.create_table(
        "template_versions",
        sa.Column("template_id", ID, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("status", WORD, nullable=False),
        sa.Column("template", JSON, nullable=False),
    )
    steps.create_table(
        "checkpoints",
        sa.Column("id", ID, primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("manifest", NAME, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("files", sa.BigInteger, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("node_id", NAME, nullable=False),
        sa.Column("kept_until", sa.BigInteger),
        sa.Column("version", sa.Integer, nullable=False),
    )
    steps.create_index("checkpoints_kept", "checkpoints", ["kept_until", "id"])
    steps.create_table(
        "volumes",
        sa.Column("id", ID, primary_key=True),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("kind", WORD, nullable=False),
        sa.Column("node_id", NAME),
        sa.Column("version", sa.Integer, nullable=False),
    )
    steps.create_index("volumes_created", "volumes", ["created_at", "id"])


def downgrade() -> None:
    for name in ("volumes", "checkpoints", "template_versions"):
        steps.drop_table(name)
    steps.drop_index("templates_status", "templates")
    for column in reversed(template_columns()):
        steps.drop_column("templates", column.name)
    for column in reversed(session_columns()):
        steps.drop_column("sessions", column.name)
