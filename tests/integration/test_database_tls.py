"""TLS to the database: which certificates are trusted, and that TLS is never skipped silently."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from pymysql.constants import CLIENT
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from atoll.errors import TemporaryError
from atoll.settings import DatabaseSettings
from atoll.stores.sql.server.connect import make_engine
from tests.servers.mariadb import MariaDB
from tests.servers.postgres import PostgreSQL
from tests.servers.process import TLS, DatabaseServer

pytestmark = pytest.mark.anyio

SERVERS: dict[str, Callable[..., DatabaseServer]] = {"mariadb": MariaDB, "postgresql": PostgreSQL}
ENCRYPTED = {
    "mysql": "SELECT variable_value <> '' FROM information_schema.session_status "
    "WHERE variable_name = 'Ssl_cipher'",
    "postgresql": "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    trustme.CA().cert_pem.write_to_path(directory / "other.pem")
    made = {
        "server": authority.issue_cert("127.0.0.1", "localhost"),
        "elsewhere": authority.issue_cert("elsewhere.example"),
        "client": authority.issue_cert("client", common_name="atoll"),
    }
    for name, each in made.items():
        each.cert_chain_pems[0].write_to_path(directory / f"{name}.pem")
        each.private_key_pem.write_to_path(directory / f"{name}.key")
    return directory


def serving(files: Path, name: str) -> TLS:
    return TLS(files / f"{name}.pem", files / f"{name}.key", files / "ca.pem")


@pytest.fixture(scope="module", params=["mariadb", "postgresql"])
def server(
    request: pytest.FixtureRequest, files: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DatabaseServer]:
    directory = tmp_path_factory.mktemp(f"{request.param}-tls")
    with SERVERS[request.param](directory, tls=serving(files, "server")) as running:
        yield running


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[AsyncConnection]:
    engine = make_engine([url], DatabaseSettings())
    try:
        async with engine.connect() as connection:
            yield connection
    finally:
        await engine.dispose()


async def is_encrypted(url: str) -> bool:
    async with connected(url) as connection:
        return bool(await connection.scalar(text(ENCRYPTED[url.partition(":")[0]])))


async def test_a_certificate_of_the_configured_authority_is_trusted(
    server: DatabaseServer, files: Path
) -> None:
    assert await is_encrypted(f"{server.url}?ssl_ca={files}/ca.pem")


async def test_a_certificate_of_another_authority_is_refused(
    server: DatabaseServer, files: Path
) -> None:
    with pytest.raises(TemporaryError, match="certificate verify failed"):
        await is_encrypted(f"{server.url}?ssl_ca={files}/other.pem")


async def test_a_certificate_for_another_host_name_is_refused(
    server: DatabaseServer, files: Path, tmp_path: Path
) -> None:
    with (
        type(server)(tmp_path, tls=serving(files, "elsewhere")) as other,
        pytest.raises(TemporaryError, match="certificate verify failed"),
    ):
        await is_encrypted(f"{other.url}?ssl_ca={files}/ca.pem")


async def test_a_client_sends_its_certificate_on_request(
    server: DatabaseServer, files: Path
) -> None:
    demand_certificates(server)

    with pytest.raises(TemporaryError, match=r"Access denied|client certificate"):
        await is_encrypted(f"{server.url}?ssl_ca={files}/ca.pem")
    assert await is_encrypted(
        f"{server.url}?ssl_ca={files}/ca.pem&ssl_cert={files}/client.pem&ssl_key={files}/client.key"
    )


def demand_certificates(server: DatabaseServer) -> None:
    if isinstance(server, MariaDB):
        server.execute("ALTER USER atoll@'%' REQUIRE X509")
        return
    rules = server.place / "data" / "pg_hba.conf"
    rules.write_text(
        rules.read_text().replace("scram-sha-256", "scram-sha-256 clientcert=verify-ca")
    )
    server.stop()
    server.start()


@pytest.mark.parametrize("kind", ["mariadb", "postgresql"])
async def test_with_tls_files_a_server_without_tls_is_refused(
    request: pytest.FixtureRequest, kind: str, files: Path
) -> None:
    plain: DatabaseServer = request.getfixturevalue(kind)

    assert not await is_encrypted(plain.url)
    with pytest.raises(TemporaryError, match=r"no TLS|rejected SSL"):
        await is_encrypted(f"{plain.url}?ssl_ca={files}/ca.pem")


async def test_sslmode_has_its_libpq_meaning(
    files: Path, tmp_path: Path, postgresql: PostgreSQL
) -> None:
    with PostgreSQL(tmp_path, tls=serving(files, "server")) as server:
        assert await is_encrypted(f"{server.url}?sslmode=require")
        assert await is_encrypted(f"{server.url}?sslmode=prefer")
        with pytest.raises(TemporaryError, match="no encryption"):
            await is_encrypted(f"{server.url}?sslmode=disable")
    assert not await is_encrypted(f"{postgresql.url}?sslmode=prefer")
    with pytest.raises(TemporaryError, match="rejected SSL"):
        await is_encrypted(f"{postgresql.url}?sslmode=require")


async def test_the_parameters_of_a_url_reach_the_server(
    mariadb: MariaDB, postgresql: PostgreSQL
) -> None:
    given = "init_command=SET%20@a%3D7&charset=utf8mb4&program_name=x&autocommit=on"
    async with connected(f"{mariadb.url}?{given}") as connection:
        assert await connection.scalar(text("SELECT @a")) == 7
        assert await connection.scalar(text("SELECT @@autocommit")) == 0
        assert await connection.scalar(text("SELECT @@tx_isolation")) == "READ-COMMITTED"
    local = f"{mariadb.scheme}://root@/atoll?unix_socket={mariadb.place}/socket"
    async with connected(local) as connection:
        assert await connection.scalar(text("SELECT 1")) == 1
    given = "application_name=my%20app&command_timeout=9"
    async with connected(f"{postgresql.url}?{given}") as connection:
        assert await connection.scalar(text("SHOW application_name")) == "my app"
        assert await connection.scalar(text("SHOW transaction_isolation")) == "read committed"


async def test_no_password_is_sent_to_a_server_without_tls(files: Path) -> None:
    """An attacker in between removes the TLS offer from the greeting to get the password."""
    received = asyncio.get_running_loop().create_future()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        capabilities = 0xFFFFFFFF & ~CLIENT.SSL
        body = (
            b"\x0a10.11.0-MariaDB\0" + struct.pack("<I", 7) + b"12345678\0"
            + struct.pack("<H", capabilities & 0xFFFF) + b"\x2d\x02\0"
            + struct.pack("<H", capabilities >> 16) + b"\x15" + bytes(10)
            + b"123456789012\0mysql_native_password\0"
        )  # fmt: skip
        writer.write(struct.pack("<I", len(body))[:3] + b"\0" + body)
        data = await reader.read(1000)
        writer.close()
        if not received.done():
            received.set_result(data)

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"mysql://atoll:secret@127.0.0.1:{port}/atoll?ssl_ca={files}/ca.pem"
        with pytest.raises(TemporaryError, match="no TLS"):
            await is_encrypted(url)
        assert await received == b""
