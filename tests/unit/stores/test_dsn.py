"""How a database URL configures its driver, and which URLs are refused."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from atoll.errors import InvalidRequest
from atoll.stores.sql.dsn import Kind, address, addresses

SECRET = "s3cr3t"


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    made = authority.issue_cert("client")
    made.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    made.private_key_pem.write_to_path(tmp_path / "key.pem")
    made.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    return tmp_path


MYSQL = {"host": "db", "port": 3306, "user": "u", "password": "p", "db": "atoll"}
POSTGRES = {"host": "db", "port": 5432, "user": "u", "password": "p", "database": "atoll"}


@pytest.mark.parametrize(
    ("url", "kind", "arguments"),
    [
        ("mysql://u:p@db/atoll", Kind.MARIADB, MYSQL),
        ("mariadb://u:p@db/atoll", Kind.MARIADB, MYSQL),
        ("mysql+aiomysql://u:p@db/atoll", Kind.MARIADB, MYSQL),
        ("postgresql://u:p@db/atoll", Kind.POSTGRESQL, POSTGRES),
        ("postgres://u:p@db/atoll", Kind.POSTGRESQL, POSTGRES),
        ("postgresql+asyncpg://u:p@db/atoll", Kind.POSTGRESQL, POSTGRES),
        ("PostgreSQL://u:p@db/atoll", Kind.POSTGRESQL, POSTGRES),
        ("mysql://u:p@db:3307/atoll", Kind.MARIADB, MYSQL | {"port": 3307}),
        ("mysql://u:p@[::1]:3307/atoll", Kind.MARIADB, MYSQL | {"host": "::1", "port": 3307}),
        ("postgresql://u:p@[fe80::1]/atoll", Kind.POSTGRESQL, POSTGRES | {"host": "fe80::1"}),
        ("postgresql://u:p@%2FRun%2Fpg/atoll", Kind.POSTGRESQL, POSTGRES | {"host": "/Run/pg"}),
        (
            "mysql://us%40er:p%40s%3As%2Fw%3F%23%25@db/at%20oll",
            Kind.MARIADB,
            MYSQL | {"user": "us@er", "password": "p@s:s/w?#%", "db": "at oll"},
        ),
        ("postgresql://u:a@b@db/atoll", Kind.POSTGRESQL, POSTGRES | {"password": "a@b"}),
        ("postgresql://u:@db/atoll", Kind.POSTGRESQL, POSTGRES | {"password": ""}),
        ("mysql://db/atoll", Kind.MARIADB, {"host": "db", "port": 3306, "db": "atoll"}),
        ("postgresql:///atoll", Kind.POSTGRESQL, {"port": 5432, "database": "atoll"}),
    ],
)
def test_a_url_becomes_the_arguments_of_its_driver(
    url: str, kind: Kind, arguments: dict[str, Any]
) -> None:
    found = address(url)

    assert found.kind is kind
    assert found.arguments == arguments


@pytest.mark.parametrize(
    ("query", "arguments"),
    [
        ("mysql://db/a?charset=utf8mb4", {"charset": "utf8mb4"}),
        ("mysql://db/a?unix_socket=/run/m.sock", {"unix_socket": "/run/m.sock"}),
        ("mysql://db/a?init_command=SET%20x%3D1", {"init_command": "SET x=1"}),
        ("mysql://db/a?program_name=atoll", {"program_name": "atoll"}),
        *(
            (f"mysql://db/a?autocommit={word}", {"autocommit": word.lower() in "true1yeson"})
            for word in ("true", "TRUE", "1", "yes", "on", "false", "False", "0", "no", "off")
        ),
        ("postgresql://db/a?command_timeout=2.5", {"command_timeout": 2.5}),
        (
            "postgresql://db/a?application_name=at%20oll",
            {"server_settings": {"application_name": "at oll"}},
        ),
        *(
            (f"postgresql://db/a?sslmode={mode}", {"ssl": mode})
            for mode in ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
        ),
        (
            "postgresql://db/a?sslmode=require&command_timeout=3",
            {"ssl": "require", "command_timeout": 3.0},
        ),
    ],
)
def test_a_parameter_becomes_an_argument_of_its_type(query: str, arguments: dict[str, Any]) -> None:
    found = address(query).arguments

    assert {
        name: found[name] for name in found if name not in ("host", "port", "db", "database")
    } == arguments


def test_a_socket_needs_no_host_and_becomes_the_name_of_the_address() -> None:
    found = address("mysql://u@/atoll?unix_socket=/run/m.sock")

    assert found.name == "/run/m.sock"
    assert "host" not in found.arguments


@pytest.mark.parametrize("scheme", ["mysql", "postgresql"])
@pytest.mark.parametrize(
    "query",
    ["ssl_ca={0}/ca.pem", "ssl_ca={0}/ca.pem&ssl_cert={0}/cert.pem&ssl_key={0}/key.pem",
     "ssl_cert={0}/both.pem"],
)  # fmt: skip
def test_certificate_files_become_a_context_that_verifies_the_server(
    scheme: str, query: str, certificates: Path
) -> None:
    context = address(f"{scheme}://db/atoll?{query.format(certificates)}").arguments["ssl"]

    assert isinstance(context, ssl.SSLContext)
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("rest", "named"),
    [
        ("mysql://u:{0}@db/a?timeout=1", "timeout"),
        ("postgresql://u:{0}@db/a?statement_cache_size=0", "statement_cache_size"),
        ("mysql://u:{0}@db/a?sslmode=require", "sslmode"),
        ("mysql://u:{0}@db/a?command_timeout=1", "command_timeout"),
        ("mysql://u:{0}@db/a?application_name=x", "application_name"),
        ("postgresql://u:{0}@db/a?charset=utf8mb4", "charset"),
        ("postgresql://u:{0}@db/a?unix_socket=/x", "unix_socket"),
        ("postgresql://u:{0}@db/a?autocommit=1", "autocommit"),
        ("mysql://u:{0}@db/a?connect_timeout=1", "connect_timeout"),
        ("postgresql://u:{0}@db/a?connect_timeout=1", "database.connect_timeout"),
        ("mysql://u:{0}@db/a?read_timeout=1", "database.operation_timeout"),
        ("mysql://u:{0}@db/a?write_timeout=1", "write_timeout"),
        ("mysql://u:{0}@db/a?autocommit=maybe", "autocommit"),
        ("mysql://u:{0}@db/a?autocommit=", "autocommit"),
        ("mysql://u:{0}@db/a?charset=klingon", "charset"),
        ("mysql://u:{0}@db/a?unix_socket=", "unix_socket"),
        ("postgresql://u:{0}@db/a?command_timeout=soon", "command_timeout"),
        ("postgresql://u:{0}@db/a?command_timeout=-1", "command_timeout"),
        ("postgresql://u:{0}@db/a?command_timeout=nan", "command_timeout"),
        ("postgresql://u:{0}@db/a?command_timeout=inf", "command_timeout"),
        ("postgresql://u:{0}@db/a?sslmode=maybe", "sslmode"),
        ("postgresql://u:{0}@db/a?sslmode=disable&ssl_ca=/ca.pem", "ssl_ca"),
        ("postgresql://u:{0}@db/a?sslmode=prefer&ssl_cert=/c.pem", "sslmode"),
        ("postgresql://u:{0}@db/a?sslmode=require&sslmode=disable", "sslmode"),
        ("mysql://u:{0}@db/a?ssl_ca=/none/ca.pem", "ssl_ca"),
        ("mysql://u:{0}@db/a?ssl_cert=/none/cert.pem", "ssl_cert"),
        ("mysql://u:{0}@db/a?ssl_key=/none/key.pem", "ssl_key"),
        ("mysql://u:{0}@db/a?charset", "parameters"),
        ("mysql://u:{0}@db", "database"),
        ("mysql://u:x@db/a,mysql://u:{0}@db/a", "ATOLL_DATABASE_URLS"),
        ("postgresql://u:x@db/a;postgresql://u:{0}@db/a", "ATOLL_DATABASE_URLS"),
        ("mysql://u:{0}@/a", "host"),
        ("mysql://u:{0}@db:port/a", "port"),
        ("mysql://u:{0}@db:99999/a", "port"),
        ("postgresql://u:x/{0}@db/a", "port"),
        ("postgresql://u:x#{0}@db/a", "%23"),
        ("postgresql://u:{0}@[::1/a", "brackets"),
        ("oracle://u:{0}@db/a", "sqlite:///"),
        ("mysql//u:{0}@db/a", "sqlite:///"),
        ("{0}", "sqlite:///"),
        ("", "sqlite:///"),
        ("sqlite://{0}/x", "sqlite:///"),
    ],
)  # fmt: skip
def test_an_invalid_url_is_refused_without_showing_the_password(rest: str, named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        address(rest.format(SECRET))

    assert caught.value.code == "bad_database_url"
    assert named in caught.value.message
    assert SECRET not in caught.value.message


@pytest.mark.parametrize(
    "urls",
    [
        [],
        ["mysql://a/atoll", "postgresql://b/atoll"],
        ["sqlite:///a.db", "postgresql://b/atoll"],
        ["sqlite:///a.db", "sqlite:///b.db"],
        ["mysql://a/atoll", "mysql://b/atoll?sslmode=require"],
    ],
    ids=["none", "two drivers", "a file and a server", "two files", "a bad second"],
)
def test_addresses_of_different_databases_are_refused(urls: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        addresses(urls)

    assert caught.value.code == "bad_database_url"


def test_several_addresses_keep_their_order_and_their_own_parameters() -> None:
    found = addresses(["postgresql://a/x?sslmode=require", "postgres://b:1/x"])

    assert [each.name for each in found] == ["a:5432", "b:1"]
    assert [each.arguments.get("ssl") for each in found] == ["require", None]


def test_an_address_does_not_show_its_password() -> None:
    assert SECRET not in repr(address(f"mysql://u:{SECRET}@db/atoll"))


@pytest.mark.parametrize(
    ("url", "file"),
    [
        ("sqlite://", ":memory:"),
        ("sqlite:///", ":memory:"),
        ("sqlite:///:memory:", ":memory:"),
        ("sqlite:///atoll.db", "atoll.db"),
        ("sqlite:////var/atoll.db", "/var/atoll.db"),
    ],
)
def test_a_sqlite_url_names_a_file_or_memory(url: str, file: str) -> None:
    assert address(url).name == file
