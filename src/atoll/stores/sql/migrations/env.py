"""Loaded by alembic. The connection is in a transaction, which the caller commits."""

from __future__ import annotations

from alembic import context

from atoll.stores.sql.metadata import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=True,
)
context.run_migrations()
