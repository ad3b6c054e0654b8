"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa

from atoll.stores.sql.migrations import steps
from atoll.stores.sql.migrations.steps import BYTES, ID, JSON, NAME, TIME, WORD, words

revision = "0001"
down_revision = None


def upgrade() -> None:
    steps.create_table(
        "templates",
        sa.Column("id", ID, primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.Column("cpu", sa.Double, nullable=False),
        sa.Column("memory", sa.BigInteger, nullable=False),
        sa.Column("disk", sa.BigInteger, nullable=False),
        sa.Column("max_processes", sa.Integer, nullable=False),
        sa.Column("pool_size", sa.Integer, nullable=False),
        sa.Column("name", JSON, nullable=False),
        sa.Column("image", JSON, nullable=False),
        sa.Column("base_image", JSON, nullable=False),
        sa.Column("pre_installed_packages", JSON, nullable=False),
        sa.Column("requirements", JSON, nullable=False),
        sa.Column("python", JSON, nullable=False),
        sa.Column("preload", JSON, nullable=False),
        sa.Column("env", JSON, nullable=False),
    )
    steps.create_index("templates_created", "templates", ["created_at", "id"])
    steps.create_table(
        "sessions",
        sa.Column("id", ID, primary_key=True),
        sa.Column("template_id", ID, nullable=False),
        sa.Column("status", WORD, nullable=False),
        sa.Column("wanted", WORD, nullable=False),
        sa.Column("runtime_type", NAME, nullable=False),
        sa.Column("runtime_node", NAME, nullable=False),
        sa.Column("cpu", sa.Double, nullable=False),
        sa.Column("memory", sa.BigInteger, nullable=False),
        sa.Column("disk", sa.BigInteger, nullable=False),
        sa.Column("max_processes", sa.Integer, nullable=False),
        sa.Column("timeout", sa.BigInteger, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.Column("expires_at", TIME, nullable=False),
        sa.Column("ended_at", TIME),
        sa.Column("instance_id", ID),
        sa.Column("cause", WORD),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("workspace", JSON),
        sa.Column("message", JSON),
        sa.Column("env_vars", JSON, nullable=False),
    )
    steps.create_index("sessions_created", "sessions", ["created_at", "id"])
    steps.create_index("sessions_status", "sessions", ["status", "created_at", "id"])
    steps.create_index("sessions_template", "sessions", ["template_id", "created_at", "id"])
    steps.create_index("sessions_expires", "sessions", ["status", "expires_at", "id"])
    steps.create_table(
        "executions",
        sa.Column("id", ID, primary_key=True),
        sa.Column("session_id", ID, nullable=False),
        sa.Column("status", WORD, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("instance_id", ID),
        sa.Column("started_at", TIME),
        sa.Column("completed_at", TIME),
        sa.Column("retry_count", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("request", JSON, nullable=False),
        sa.Column("outcome", JSON),
        sa.Column("return_json", BYTES),
        sa.Column("stdout", BYTES),
        sa.Column("stderr", BYTES),
    )
    steps.create_index("executions_created", "executions", ["created_at", "id"])
    steps.create_index("executions_status", "executions", ["status", "created_at", "id"])
    steps.create_index("executions_session", "executions", ["session_id", "created_at", "id"])
    steps.create_table(
        "instances",
        sa.Column("id", ID, primary_key=True),
        sa.Column("node_id", NAME, nullable=False),
        sa.Column("template_id", ID, nullable=False),
        sa.Column("template_version", sa.Integer, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("session_id", ID),
        sa.Column("workspace", JSON, nullable=False),
        sa.Column("handle", JSON, nullable=False),
    )
    steps.create_table(
        "api_keys",
        sa.Column("id", ID, primary_key=True),
        sa.Column("digest", words(128), nullable=False),
        sa.Column("scope", WORD, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("name", JSON, nullable=False),
    )
    steps.create_index("api_keys_digest", "api_keys", ["digest"], unique=True)


def downgrade() -> None:
    steps.drop_table("api_keys")
    steps.drop_table("instances")
    steps.drop_table("executions")
    steps.drop_table("sessions")
    steps.drop_table("templates")
