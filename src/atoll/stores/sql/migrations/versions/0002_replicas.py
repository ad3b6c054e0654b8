"""Who sees to what, parts that are kept elsewhere, and requests with a key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0002"
down_revision = "0001"

ID = sa.String(64)
NAME = sa.String(255)
TIME = sa.BigInteger()
JSON = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
BYTES = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


def upgrade() -> None:
    op.add_column("executions", sa.Column("holder", ID))
    op.add_column("executions", sa.Column("kept", JSON))
    op.add_column("instances", sa.Column("holder", ID))
    op.create_table(
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
    op.create_index("keyed_requests_expires", "keyed_requests", ["expires_at"])
    op.create_table(
        "properties",
        sa.Column("name", ID, primary_key=True),
        sa.Column("value", NAME, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("properties")
    op.drop_table("keyed_requests")
    op.drop_column("instances", "holder")
    op.drop_column("executions", "kept")
    op.drop_column("executions", "holder")
