"""
The schema, for the migrations to follow.

A column bears its field's name. Times are microseconds since 1970 in UTC. Ids and words of ours
are plain text; text that a user wrote and structures are JSON in ASCII, because databases differ in
the text that they take (NUL, lone surrogates) and JSON takes any. Output is bytes as they came;
what is large is not here but in the blob store.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects import mysql

metadata = MetaData()


def words(length: int) -> String:
    """Text that compares by its bytes everywhere, as it does in SQLite."""
    return (
        String(length)
        .with_variant(mysql.VARCHAR(length, collation="utf8mb4_nopad_bin"), "mysql", "mariadb")
        .with_variant(String(length, collation="C"), "postgresql")
    )


ID = words(64)
WORD = words(32)
NAME = words(255)
TIME = BigInteger()
JSON = Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
COUNTED = BigInteger().with_variant(Integer(), "sqlite")
"""SQLite numbers rows by itself in a column of this type alone."""
BYTES = LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")

templates = Table(
    "templates",
    metadata,
    Column("id", ID, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("created_at", TIME, nullable=False),
    Column("updated_at", TIME, nullable=False),
    Column("cpu", Double, nullable=False),
    Column("memory", BigInteger, nullable=False),
    Column("disk", BigInteger, nullable=False),
    Column("max_processes", Integer, nullable=False),
    Column("pool_size", Integer, nullable=False),
    Column("name", JSON, nullable=False),
    Column("image", JSON, nullable=False),
    Column("base_image", JSON, nullable=False),
    Column("pre_installed_packages", JSON, nullable=False),
    # `require` is a word of MariaDB's own.
    Column("requirements", JSON, nullable=False),
    Column("python", JSON, nullable=False),
    Column("preload", JSON, nullable=False),
    Column("env", JSON, nullable=False),
    Column("number", Integer, nullable=False, server_default=text("1")),
    Column("status", WORD, nullable=False, server_default=text("'ready'")),
    Column("build", JSON),
    Column("pool_max", Integer),
    Column("runtime", ID),
    Column("dockerfile", JSON),
    Column("build_context", ID),
    Column("registry", JSON),
    Index("templates_created", "created_at", "id"),
    Index("templates_status", "status", "id"),
)

template_versions = Table(
    "template_versions",
    metadata,
    Column("template_id", ID, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("status", WORD, nullable=False),
    Column("template", JSON, nullable=False),
)
"""What templates were before: `template` is the row in `templates` as it was, by columns."""

sessions = Table(
    "sessions",
    metadata,
    Column("id", ID, primary_key=True),
    Column("template_id", ID, nullable=False),
    Column("status", WORD, nullable=False),
    Column("wanted", WORD, nullable=False),
    Column("runtime_type", NAME, nullable=False),
    Column("runtime_node", NAME, nullable=False),
    Column("cpu", Double, nullable=False),
    Column("memory", BigInteger, nullable=False),
    Column("disk", BigInteger, nullable=False),
    Column("max_processes", Integer, nullable=False),
    Column("timeout", BigInteger, nullable=False),
    Column("created_at", TIME, nullable=False),
    Column("updated_at", TIME, nullable=False),
    Column("expires_at", TIME, nullable=False),
    Column("ended_at", TIME),
    Column("instance_id", ID),
    Column("cause", WORD),
    Column("version", Integer, nullable=False),
    Column("workspace", JSON),
    Column("message", JSON),
    Column("env_vars", JSON, nullable=False),
    Column("capacity", Integer, nullable=False, server_default=text("1")),
    Column("template_version", Integer, nullable=False, server_default=text("1")),
    Column("workspace_mode", WORD, nullable=False, server_default=text("'sync'")),
    Column("durability", WORD, nullable=False, server_default=text("'background'")),
    Column("started_from", ID),
    Column("install", JSON),
    Column("secrets", JSON),
    Column("volumes", JSON),
    Column("warnings", JSON),
    Column("labels", JSON),
    Column("node_labels", JSON),
    Column("auto_start", Integer, nullable=False, server_default=text("1")),
    Column("idle_timeout", BigInteger),
    Column("archive_after", BigInteger),
    Column("delete_after", BigInteger),
    Column("active_at", TIME),
    Column("rested_at", TIME),
    Column("failures", Integer, nullable=False, server_default=text("0")),
    Column("retry_at", TIME),
    Column("unsettled_at", TIME),
    Column("timer_at", TIME),
    Index("sessions_created", "created_at", "id"),
    Index("sessions_status", "status", "created_at", "id"),
    Index("sessions_template", "template_id", "created_at", "id"),
    Index("sessions_unsettled", "runtime_node", "unsettled_at"),
    Index("sessions_timer", "runtime_node", "timer_at"),
    Index("sessions_node", "runtime_node", "status", "id"),
)
"""`unsettled_at` and `timer_at` are what `model.plan` says of the rest, to be looked for."""

executions = Table(
    "executions",
    metadata,
    Column("id", ID, primary_key=True),
    Column("session_id", ID, nullable=False),
    Column("status", WORD, nullable=False),
    Column("created_at", TIME, nullable=False),
    Column("instance_id", ID),
    Column("started_at", TIME),
    Column("completed_at", TIME),
    Column("retry_count", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("request", JSON, nullable=False),
    Column("outcome", JSON),
    Column("return_json", BYTES),
    Column("stdout", BYTES),
    Column("stderr", BYTES),
    Column("holder", ID),
    Column("kept", JSON),
    Column("invocation_id", ID),
    Column("attempts", JSON),
    Column("results_json", BYTES),
    Column("ordinal", BigInteger, nullable=False, server_default=text("1")),
    Column("superseded", Integer, nullable=False, server_default=text("0")),
    Column("invoked_at", TIME),
    Index("executions_created", "created_at", "id"),
    Index("executions_status", "status", "created_at", "id"),
    # After the one above: of two that serve, SQLite takes the later; a session is the smaller set.
    Index("executions_session", "session_id", "created_at", "id"),
    Index("executions_session_status", "session_id", "status", "created_at", "id"),
    # The order of its executions, and what lets only one be the first.
    Index("executions_invocation", "invocation_id", "ordinal", unique=True),
)

instances = Table(
    "instances",
    metadata,
    Column("id", ID, primary_key=True),
    Column("node_id", NAME, nullable=False),
    Column("template_id", ID, nullable=False),
    Column("template_version", Integer, nullable=False),
    Column("created_at", TIME, nullable=False),
    Column("session_id", ID),
    Column("workspace", JSON, nullable=False),
    Column("handle", JSON, nullable=False),
    Column("holder", ID),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", ID, primary_key=True),
    Column("digest", words(128), nullable=False),
    Column("scope", WORD, nullable=False),
    Column("created_at", TIME, nullable=False),
    Column("name", JSON, nullable=False),
    Index("api_keys_digest", "digest", unique=True),
)
"""`digest` in hexadecimal: bytes cannot be indexed everywhere."""

keyed_requests = Table(
    "keyed_requests",
    metadata,
    Column("id", ID, primary_key=True),
    Column("holder", ID, nullable=False),
    Column("created_at", TIME, nullable=False),
    Column("expires_at", TIME, nullable=False),
    Column("fingerprint", ID),
    Column("status", Integer),
    Column("kept", NAME),
    Column("headers", JSON),
    Column("body", BYTES),
    Index("keyed_requests_expires", "expires_at"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", ID, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("manifest", NAME, nullable=False),
    Column("created_at", TIME, nullable=False),
    Column("files", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("node_id", NAME, nullable=False),
    Column("kept_until", TIME),
    Column("version", Integer, nullable=False),
    Column("backups", JSON),
    Index("checkpoints_kept", "kept_until", "id"),
)
"""`id` is the session's."""

volumes = Table(
    "volumes",
    metadata,
    Column("id", ID, primary_key=True),
    Column("created_at", TIME, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("kind", WORD, nullable=False),
    Column("node_id", NAME),
    Column("version", Integer, nullable=False),
    Index("volumes_created", "created_at", "id"),
)

nodes = Table(
    "nodes",
    metadata,
    Column("id", NAME, primary_key=True),
    Column("type", NAME, nullable=False),
    Column("seen_at", TIME),
    Column("told", JSON, nullable=False),
    Column("status", WORD, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("problem", JSON),
    Column("cordoned", Integer, nullable=False),
    Column("drain", JSON),
)
"""`told` is what a node says of itself; others write what follows it."""

events = Table(
    "events",
    metadata,
    Column("id", COUNTED, primary_key=True, autoincrement=True),
    Column("number", BigInteger),
    Column("created_at", TIME, nullable=False),
    Column("type", NAME, nullable=False),
    Column("subject", ID, nullable=False),
    Column("data", JSON, nullable=False),
    Index("events_number", "number", unique=True),
)
"""
Written with what they tell of; `number`, their place on the feed, is given later, because rows
become visible in another order than they were numbered in.
"""

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", ID, primary_key=True),
    Column("created_at", TIME, nullable=False),
    Column("url", JSON, nullable=False),
    Column("secret", JSON, nullable=False),
    Column("types", JSON, nullable=False),
    Column("delivered", BigInteger, nullable=False),
    Column("state", JSON),
    Column("version", Integer, nullable=False),
)
"""`delivered` is the number of the last event that it was told of; its secret is encrypted."""

properties = Table(
    "properties",
    metadata,
    Column("name", ID, primary_key=True),
    Column("value", NAME, nullable=False),
)
"""What a database knows of itself."""
