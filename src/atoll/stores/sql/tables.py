"""
The schema, for the migrations to follow.

A column is named after its field. Times are microseconds since 1970 in UTC. Ids and enums are plain
text. Text written by users and structures are JSON in ASCII, because databases differ in the text
that they accept (NUL, lone surrogates). Output is stored as the bytes that came; what is too large
for a row is in the blob store.
"""

from __future__ import annotations

from atoll.stores.sql.columns import Column, ColumnType, Index, Storage, Table, text

ID = text(64)
WORD = text(32)
NAME = text(255)
JSON = ColumnType(Storage.JSON)
BYTES = ColumnType(Storage.BYTES)
INTEGER = ColumnType(Storage.INTEGER)
BIGINT = ColumnType(Storage.BIGINT)
DOUBLE = ColumnType(Storage.DOUBLE)
SERIAL = ColumnType(Storage.SERIAL)
TIME = BIGINT

TEMPLATES = Table(
    "templates",
    Column("id", ID, primary_key=True),
    Column("version", INTEGER),
    Column("created_at", TIME),
    Column("updated_at", TIME),
    Column("cpu", DOUBLE),
    Column("memory", BIGINT),
    Column("disk", BIGINT),
    Column("max_processes", INTEGER),
    Column("pool_size", INTEGER),
    Column("name", JSON),
    Column("image", JSON),
    Column("base_image", JSON),
    Column("pre_installed_packages", JSON),
    # `require` is a keyword of MariaDB.
    Column("requirements", JSON),
    Column("python", JSON),
    Column("preload", JSON),
    Column("env", JSON),
    Column("number", INTEGER, default="1"),
    Column("status", WORD, default="'ready'"),
    Column("build", JSON, null=True),
    Column("pool_max", INTEGER, null=True),
    Column("runtime", ID, null=True),
    Column("dockerfile", JSON, null=True),
    Column("build_context", ID, null=True),
    Column("registry", JSON, null=True),
    Index("templates_created", ("created_at", "id")),
    Index("templates_status", ("status", "id")),
)

TEMPLATE_VERSIONS = Table(
    "template_versions",
    Column("template_id", ID, primary_key=True),
    Column("number", INTEGER, primary_key=True),
    Column("status", WORD),
    Column("template", JSON),
)
"""Previous versions: `template` is the row that the version had in `templates`, as JSON."""

SESSIONS = Table(
    "sessions",
    Column("id", ID, primary_key=True),
    Column("template_id", ID),
    Column("status", WORD),
    Column("wanted", WORD),
    Column("runtime_type", NAME),
    Column("runtime_node", NAME),
    Column("cpu", DOUBLE),
    Column("memory", BIGINT),
    Column("disk", BIGINT),
    Column("max_processes", INTEGER),
    Column("timeout", BIGINT),
    Column("created_at", TIME),
    Column("updated_at", TIME),
    Column("expires_at", TIME),
    Column("ended_at", TIME, null=True),
    Column("instance_id", ID, null=True),
    Column("cause", WORD, null=True),
    Column("version", INTEGER),
    Column("workspace", JSON, null=True),
    Column("message", JSON, null=True),
    Column("env_vars", JSON),
    Column("capacity", INTEGER, default="1"),
    Column("template_version", INTEGER, default="1"),
    Column("workspace_mode", WORD, default="'sync'"),
    Column("durability", WORD, default="'background'"),
    Column("started_from", ID, null=True),
    Column("install", JSON, null=True),
    Column("secrets", JSON, null=True),
    Column("volumes", JSON, null=True),
    Column("warnings", JSON, null=True),
    Column("labels", JSON, null=True),
    Column("node_labels", JSON, null=True),
    Column("auto_start", INTEGER, default="1"),
    Column("idle_timeout", BIGINT, null=True),
    Column("archive_after", BIGINT, null=True),
    Column("delete_after", BIGINT, null=True),
    Column("active_at", TIME, null=True),
    Column("rested_at", TIME, null=True),
    Column("failures", INTEGER, default="0"),
    Column("retry_at", TIME, null=True),
    Column("unsettled_at", TIME, null=True),
    Column("timer_at", TIME, null=True),
    Index("sessions_created", ("created_at", "id")),
    Index("sessions_status", ("status", "created_at", "id")),
    Index("sessions_template", ("template_id", "created_at", "id")),
    Index("sessions_unsettled", ("runtime_node", "unsettled_at")),
    Index("sessions_timer", ("runtime_node", "timer_at")),
    Index("sessions_node", ("runtime_node", "status", "id")),
)
"""`unsettled_at` and `timer_at` are computed by `model.plan`, so that sweeps can query them."""

EXECUTIONS = Table(
    "executions",
    Column("id", ID, primary_key=True),
    Column("session_id", ID),
    Column("status", WORD),
    Column("created_at", TIME),
    Column("instance_id", ID, null=True),
    Column("started_at", TIME, null=True),
    Column("completed_at", TIME, null=True),
    Column("retry_count", INTEGER),
    Column("version", INTEGER),
    Column("request", JSON),
    Column("outcome", JSON, null=True),
    Column("return_json", BYTES, null=True),
    Column("stdout", BYTES, null=True),
    Column("stderr", BYTES, null=True),
    Column("holder", ID, null=True),
    Column("kept", JSON, null=True),
    Column("invocation_id", ID, null=True),
    Column("attempts", JSON, null=True),
    Column("results_json", BYTES, null=True),
    Column("ordinal", BIGINT, default="1"),
    Column("superseded", INTEGER, default="0"),
    Column("invoked_at", TIME, null=True),
    Index("executions_created", ("created_at", "id")),
    Index("executions_status", ("status", "created_at", "id")),
    # After the one above: SQLite prefers the later of two indexes, and this one finds fewer rows.
    Index("executions_session", ("session_id", "created_at", "id")),
    Index("executions_session_status", ("session_id", "status", "created_at", "id")),
    # Orders the executions of an invocation and lets only one be the first.
    Index("executions_invocation", ("invocation_id", "ordinal"), unique=True),
)

INSTANCES = Table(
    "instances",
    Column("id", ID, primary_key=True),
    Column("node_id", NAME),
    Column("template_id", ID),
    Column("template_version", INTEGER),
    Column("created_at", TIME),
    Column("session_id", ID, null=True),
    Column("workspace", JSON),
    Column("handle", JSON),
    Column("holder", ID, null=True),
)

API_KEYS = Table(
    "api_keys",
    Column("id", ID, primary_key=True),
    Column("digest", text(128)),
    Column("scope", WORD),
    Column("created_at", TIME),
    Column("name", JSON),
    Index("api_keys_digest", ("digest",), unique=True),
)
"""`digest` in hexadecimal: bytes cannot be indexed everywhere."""

KEYED_REQUESTS = Table(
    "keyed_requests",
    Column("id", ID, primary_key=True),
    Column("holder", ID),
    Column("created_at", TIME),
    Column("expires_at", TIME),
    Column("fingerprint", ID, null=True),
    Column("status", INTEGER, null=True),
    Column("kept", NAME, null=True),
    Column("headers", JSON, null=True),
    Column("body", BYTES, null=True),
    Index("keyed_requests_expires", ("expires_at",)),
)

CHECKPOINTS = Table(
    "checkpoints",
    Column("id", ID, primary_key=True),
    Column("number", BIGINT),
    Column("manifest", NAME),
    Column("created_at", TIME),
    Column("files", BIGINT),
    Column("size", BIGINT),
    Column("node_id", NAME),
    Column("kept_until", TIME, null=True),
    Column("version", INTEGER),
    Column("backups", JSON, null=True),
    Index("checkpoints_kept", ("kept_until", "id")),
)
"""`id` is the session's."""

VOLUMES = Table(
    "volumes",
    Column("id", ID, primary_key=True),
    Column("created_at", TIME),
    Column("size", BIGINT),
    Column("kind", WORD),
    Column("node_id", NAME, null=True),
    Column("version", INTEGER),
    Index("volumes_created", ("created_at", "id")),
)

NODES = Table(
    "nodes",
    Column("id", NAME, primary_key=True),
    Column("type", NAME),
    Column("seen_at", TIME, null=True),
    Column("told", JSON),
    Column("status", WORD),
    Column("failures", INTEGER),
    Column("problem", JSON, null=True),
    Column("cordoned", INTEGER),
    Column("drain", JSON, null=True),
)
"""`told` is what the node reports on itself; other nodes write the columns after it."""

EVENTS = Table(
    "events",
    Column("id", SERIAL, primary_key=True),
    Column("number", BIGINT, null=True),
    Column("created_at", TIME),
    Column("type", NAME),
    Column("subject", ID),
    Column("data", JSON),
    Index("events_number", ("number",), unique=True),
)
"""
Stored with the change that they report; `number`, the position on the feed, is assigned later,
because rows become visible in another order than that of their ids.
"""

WEBHOOKS = Table(
    "webhooks",
    Column("id", ID, primary_key=True),
    Column("created_at", TIME),
    Column("url", JSON),
    Column("secret", JSON),
    Column("types", JSON),
    Column("delivered", BIGINT),
    Column("state", JSON, null=True),
    Column("version", INTEGER),
)
"""`delivered` is the number of the last event that was sent; `secret` is encrypted."""

PROPERTIES = Table(
    "properties",
    Column("name", ID, primary_key=True),
    Column("value", NAME),
)
"""Names and values that belong to the database as such, such as its id."""

TABLES = (
    TEMPLATES,
    TEMPLATE_VERSIONS,
    SESSIONS,
    EXECUTIONS,
    INSTANCES,
    API_KEYS,
    KEYED_REQUESTS,
    CHECKPOINTS,
    VOLUMES,
    NODES,
    EVENTS,
    WEBHOOKS,
    PROPERTIES,
)
