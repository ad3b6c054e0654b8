"""What the tests of the stores rely on in the servers that they start."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from tests.servers.mariadb import MariaDB
from tests.servers.postgres import PostgreSQL
from tests.servers.process import TLS, DatabaseServer

pytestmark = pytest.mark.anyio

DRIVERS = {"mysql": "mysql+aiomysql", "postgresql": "postgresql+asyncpg"}
KINDS = pytest.mark.parametrize("kind", [MariaDB, PostgreSQL])


def connect(server: DatabaseServer, **options: object) -> AsyncEngine:
    scheme, rest = server.url.split("://")
    return create_async_engine(
        f"{DRIVERS[scheme]}://{rest}", poolclass=NullPool, connect_args=options
    )


@pytest.fixture
def tls(tmp_path: Path) -> TLS:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1", "localhost")
    files = TLS(tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem")
    made.cert_chain_pems[0].write_to_path(files.certificate)
    made.private_key_pem.write_to_path(files.key)
    authority.cert_pem.write_to_path(files.authority)
    return files


@KINDS
async def test_committed_data_survives_a_kill(kind: type[DatabaseServer], tmp_path: Path) -> None:
    with kind(tmp_path) as server:
        engine = connect(server)
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE kept (number INTEGER)"))
            await connection.execute(text("INSERT INTO kept VALUES (42)"))

        server.kill()
        server.start()

        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT number FROM kept")) == 42
        server.stop()
        server.start()
        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT number FROM kept")) == 42


@KINDS
async def test_a_server_with_tls_refuses_plain_connections(
    kind: type[DatabaseServer], tmp_path: Path, tls: TLS
) -> None:
    trusting = ssl.create_default_context(cafile=str(tls.authority))
    with kind(tmp_path, tls=tls) as server:
        async with connect(server, ssl=trusting).connect() as connection:
            assert await connection.scalar(text("SELECT 42")) == 42
        with pytest.raises(Exception, match=r"Access denied|no encryption"):
            await connect(server, ssl=False).connect()
