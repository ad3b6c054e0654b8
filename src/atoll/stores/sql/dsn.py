"""
Parses database URLs into the arguments of the driver's `connect`.

Every parameter is checked: one that is unknown, not supported by the driver, or in contradiction to
another is refused at start, with a message that names it. Messages never show a URL, because it may
contain a password.
"""

from __future__ import annotations

import math
import ssl
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MEMORY = ":memory:"


class Kind(StrEnum):
    SQLITE = "sqlite"
    MARIADB = "mariadb"
    POSTGRESQL = "postgresql"


@dataclass(frozen=True, slots=True)
class Address:
    kind: Kind
    name: str
    """Host and port, or the file, for messages."""
    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Arguments of the driver's `connect`."""


SCHEMES = {
    "sqlite": Kind.SQLITE,
    "mysql": Kind.MARIADB,
    "mariadb": Kind.MARIADB,
    "mysql+aiomysql": Kind.MARIADB,
    "mariadb+aiomysql": Kind.MARIADB,
    "postgres": Kind.POSTGRESQL,
    "postgresql": Kind.POSTGRESQL,
    "postgresql+asyncpg": Kind.POSTGRESQL,
}
PORTS = {Kind.MARIADB: 3306, Kind.POSTGRESQL: 5432}
TLS_FILES = ("ssl_ca", "ssl_cert", "ssl_key")
TLS_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
BOOLEANS = {
    "true": True, "1": True, "yes": True, "on": True,
    "false": False, "0": False, "no": False, "off": False,
}  # fmt: skip
SETTINGS_INSTEAD = {
    "connect_timeout": "use the setting database.connect_timeout",
    "read_timeout": "use the setting database.operation_timeout",
    "write_timeout": "use the setting database.operation_timeout",
}


def addresses(urls: Sequence[str]) -> tuple[Address, ...]:
    """The addresses of one database, in the order to try; all of one kind."""
    if not urls:
        raise _refusal("No database URL was given.")
    found = tuple(address(url) for url in urls)
    kinds = sorted({each.kind for each in found})
    if len(kinds) > 1:
        raise _refusal(
            f"The addresses of a database must be of one kind, not of {' and '.join(kinds)}."
        )
    if len(found) > 1 and kinds == [Kind.SQLITE]:
        raise _refusal("A SQLite database has one file: give only one database URL.")
    return found


def address(url: str) -> Address:
    scheme, separator, rest = url.partition("://")
    kind = SCHEMES.get(scheme.lower())
    if kind is None or not separator:
        raise _refusal(
            "A database URL begins with sqlite:///, mysql://, mariadb:// or postgresql://."
        )
    if kind is Kind.SQLITE:
        file = _sqlite_file(rest)
        return Address(kind, file, {"database": file})
    return _server(kind, url)


def _sqlite_file(path: str) -> str:
    if not (path == "" or path.startswith("/")):
        raise _refusal(
            "A SQLite URL names no host: write sqlite:///file, sqlite:////path/to/file or "
            "sqlite:///:memory:."
        )
    return path.removeprefix("/") or MEMORY


def _server(kind: Kind, url: str) -> Address:
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _refusal(f"The {kind} URL is malformed. Check the brackets of the host.") from None
    if parts.fragment or "#" in url:
        raise _refusal(f"The {kind} URL contains '#'. In a name or a password, write it as %23.")
    login, _, place = parts.netloc.rpartition("@")
    host, port = _place(kind, place)
    user, _, password = login.partition(":")
    database = unquote(parts.path.removeprefix("/"))
    if not database:
        raise _refusal(f"The {kind} URL has no database name. Write {kind}://user@host/database.")
    if any(sign in database for sign in (",", ";", "/", "@")):
        # Does not show the name: the rest may be another address, with its password.
        raise _refusal(
            "The database name contains one of , ; / @. Put several addresses into "
            "ATOLL_DATABASE_URLS, separated by commas."
        )
    arguments: dict[str, Any] = {"port": port}
    arguments["database" if kind is Kind.POSTGRESQL else "db"] = database
    if host:
        arguments["host"] = host
    if user:
        arguments["user"] = unquote(user)
    if ":" in login:
        arguments["password"] = unquote(password)
    arguments |= _parameters(kind, parts.query)
    socket = arguments.get("unix_socket")
    if not host and not socket and kind is Kind.MARIADB:
        raise _refusal("The mariadb URL names neither a host nor a unix_socket.")
    written = f"[{host}]" if ":" in host else host or "local socket"
    return Address(kind, socket or f"{written}:{port}", arguments)


def _place(kind: Kind, place: str) -> tuple[str, int]:
    """Host, without brackets and percent-encoding, and port."""
    if place.startswith("["):
        host, _, port = place[1:].partition("]")
        port = port.removeprefix(":")
    else:
        host, _, port = place.partition(":")
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        # Does not show the port, which is a part of the password if that has a bare '/' or '@'.
        raise _refusal(
            f"Invalid port in the {kind} URL. In a password, write '/' as %2F, '@' as %40, ':' as "
            "%3A and '?' as %3F."
        )
    return unquote(host), int(port) if port else PORTS[kind]


def _parameters(kind: Kind, query: str) -> dict[str, Any]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise _refusal(
            f"The parameters of the {kind} URL are malformed. Write ?name=value&name=value."
        ) from None
    given = dict(pairs)
    if len(given) < len(pairs):
        twice = sorted({name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1})
        raise _refusal(f"{', '.join(twice)}: given more than once in the {kind} URL.")
    for name in given:
        if name in SETTINGS_INSTEAD:
            raise _refusal(f"{name}: not a parameter of a database URL; {SETTINGS_INSTEAD[name]}.")
        if name not in TLS_FILES and name not in PARAMETERS[kind]:
            known = ", ".join(sorted({*PARAMETERS[kind], *TLS_FILES}))
            others = [other for other, names in PARAMETERS.items() if name in names]
            why = f"a parameter of {others[0]} only" if others else "an unknown parameter"
            raise _refusal(f"{name}: {why}; a {kind} URL takes {known}.")
    arguments: dict[str, Any] = {}
    for name, convert in PARAMETERS[kind].items():
        if name in given:
            arguments |= convert(name, given[name])
    if files := {name: given[name] for name in TLS_FILES if name in given}:
        if "sslmode" in given:
            raise _refusal(
                f"sslmode and {', '.join(files)}: give one or the other. With files, TLS is "
                "required and verified; sslmode chooses the mode."
            )
        arguments["ssl"] = _context(files)
    return arguments


def _context(files: Mapping[str, str]) -> ssl.SSLContext:
    """Required TLS that verifies the server's certificate and name."""
    if "ssl_key" in files and "ssl_cert" not in files:
        raise _refusal("ssl_key: requires ssl_cert.")
    name = "ssl_ca"
    try:
        context = ssl.create_default_context(cafile=files.get("ssl_ca"))
        if "ssl_cert" in files:
            name = "ssl_key" if "ssl_key" in files else "ssl_cert"
            context.load_cert_chain(files["ssl_cert"], files.get("ssl_key"))
    except OSError as error:
        place = files["ssl_cert"] if name != "ssl_ca" else files["ssl_ca"]
        raise _refusal(f"{name}: {place} cannot be used: {error.strerror or error}.") from error
    return context


def _same(name: str, value: str) -> dict[str, Any]:
    if not value:
        raise _refusal(f"{name}: the value is empty.")
    return {name: value}


def _charset(name: str, value: str) -> dict[str, Any]:
    from pymysql.charset import charset_by_name

    if charset_by_name(value) is None:
        raise _refusal(
            f"{name}: the driver does not know the character set {value!r}. Use utf8mb4."
        )
    return {name: value}


def _boolean(name: str, value: str) -> dict[str, Any]:
    if value.lower() not in BOOLEANS:
        raise _refusal(f"{name}: {value!r} is neither true nor false ({', '.join(BOOLEANS)}).")
    return {name: BOOLEANS[value.lower()]}


def _seconds(name: str, value: str) -> dict[str, Any]:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0
    if not (0 < seconds < math.inf):
        raise _refusal(f"{name}: {value!r} is not a number of seconds above 0.")
    return {name: seconds}


def _mode(name: str, value: str) -> dict[str, Any]:
    if value not in TLS_MODES:
        raise _refusal(f"{name}: {value!r} is none of {', '.join(TLS_MODES)}.")
    return {"ssl": value}


def _server_setting(name: str, value: str) -> dict[str, Any]:
    return {"server_settings": {name: value}}


PARAMETERS: Mapping[Kind, Mapping[str, Callable[[str, str], dict[str, Any]]]] = {
    Kind.MARIADB: {
        "autocommit": _boolean,
        "charset": _charset,
        "init_command": _same,
        "program_name": _same,
        "unix_socket": _same,
    },
    Kind.POSTGRESQL: {
        "application_name": _server_setting,
        "command_timeout": _seconds,
        "sslmode": _mode,
    },
}
"""Parameters other than TLS files, and how each becomes an argument."""


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="bad_database_url")
