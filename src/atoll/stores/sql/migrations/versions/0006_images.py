"""Templates from images: runtime, Dockerfile, its context, and credentials of a registry."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from atoll.stores.sql.migrations import steps
from atoll.stores.sql.migrations.steps import ID, JSON

revision = "0006"
down_revision = "0005"


def columns() -> list[sa.Column[Any]]:
    """New ones each time: a column belongs to one table."""
    return [
        sa.Column("runtime", ID),
        sa.Column("dockerfile", JSON),
        sa.Column("build_context", ID),
        sa.Column("registry", JSON),
    ]


def upgrade() -> None:
    for column in columns():
        steps.add_column("templates", column)


def downgrade() -> None:
    for column in reversed(columns()):
        steps.drop_column("templates", column.name)
