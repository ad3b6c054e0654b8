"""
Translates errors of SQLAlchemy and the database drivers into Atoll's.

The class of an error that makes the database unavailable also shows what happened to the
transaction, which decides how it is retried: see the subclasses of `DatabaseUnavailable`.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import exc

from atoll.errors import AtollError, DatabaseUnavailable, InvalidRequest, TemporaryError, TooLarge

# The server rolled back: deadlock, serialisation failure, timeout of a lock or statement.
ROLLED_BACK = {"40001", "40P01", "55P03", "57014", 1205, 1213, 1969, 3024}
# A secondary that was not promoted.
READ_ONLY = {"25006", 1290, 1792, 1836}
# Out of connections, memory or disk.
EXHAUSTED = {"53000", "53100", "53200", "53300", 1021, 1040, 1041, 1114, 1203, 1226}
PACKET_TOO_LARGE = 1153
# MariaDB's numbers from 2000 on are the driver's: connections that failed or broke.
SHUTTING_DOWN = {1053, 1077, 1079, 1080, 1152, 1158, 1159, 1160, 1161, 1184, 1927}
UNIQUE_VIOLATIONS = {"23505", 1062}
# Text that is too long or not accepted, numbers out of range.
INVALID_VALUES = {"22000", "22001", "22003", "22021", "22P05", 1264, 1366, 1406}


class ConnectionFailed(DatabaseUnavailable):
    """No connection could be made, so nothing happened."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after=5.0)


class ServerRefused(DatabaseUnavailable):
    """The server answered that it cannot serve this connection or statement for now."""


class RolledBack(DatabaseUnavailable):
    """The server rolled the transaction back; it can be repeated."""


class OutcomeUnknown(DatabaseUnavailable):
    """The connection broke, perhaps during a commit that succeeded."""


def error_code(error: BaseException) -> str | int | None:
    """MariaDB's error number, or PostgreSQL's SQLSTATE."""
    source: Any = getattr(error, "orig", None) or error
    first = source.args[0] if source.args else None
    if isinstance(first, int) and not isinstance(source, OSError):
        return first
    state = getattr(source, "sqlstate", None)
    return None if state is None else str(state)


def is_usable(error: BaseException) -> bool:
    """Whether the connection can be used again after a rollback."""
    if isinstance(error, exc.DBAPIError):
        found = error_code(error)
        return found in UNIQUE_VIOLATIONS | INVALID_VALUES | ROLLED_BACK or (
            isinstance(error, exc.IntegrityError | exc.ProgrammingError | exc.DataError)
            and not error.connection_invalidated
        )
    return isinstance(error, Exception) and not isinstance(
        error, exc.SQLAlchemyError | OSError | EOFError | TemporaryError
    )


def translate(error: Exception, name: str) -> Exception:
    """The AtollError for an error of a server; the error itself if it is a bug in Atoll."""
    found = error_code(error)
    message = message_of(error)
    translated: Exception
    match error:
        case AtollError():
            return error
        case UnicodeEncodeError():
            translated = InvalidRequest("An id or a name contains an unpaired surrogate.")
        case exc.TimeoutError():
            # Not retried and not an outage: retries would only make the queue longer.
            translated = DatabaseUnavailable(
                f"All connections to the database {name} are in use. Raise database.pool_size or "
                "database.max_overflow.",
                retry_after=5.0,
            )
        case _ if found in ROLLED_BACK:
            translated = RolledBack(f"The database {name} rolled a transaction back: {message}.")
        case _ if found in INVALID_VALUES or isinstance(error, exc.DataError):
            translated = InvalidRequest(f"The database does not accept a value: {message}.")
        case _ if found == PACKET_TOO_LARGE:
            translated = TooLarge("The request is larger than the database's max_allowed_packet.")
        case _ if found in READ_ONLY:
            translated = ServerRefused(
                f"The database {name} is read-only: {message}. Is it a secondary?"
            )
        case _ if found in EXHAUSTED:
            translated = ServerRefused(f"The database {name} is out of resources: {message}.")
        case TimeoutError():
            translated = OutcomeUnknown(f"The database {name} did not answer in time.")
        case _ if _broken(error):
            translated = OutcomeUnknown(f"The connection to the database {name} broke: {message}.")
        case _:
            return error
    translated.__cause__ = error
    return translated


def _broken(error: Exception) -> bool:
    if isinstance(error, OSError | EOFError):
        return True
    if not isinstance(error, exc.DBAPIError):
        return False
    match error_code(error):
        case int() as found:
            return found >= 2000 or found in SHUTTING_DOWN
        case str() as state:
            return state[:2] in ("08", "57", "XX")
        case _:
            return error.connection_invalidated or isinstance(
                error, exc.InterfaceError | exc.InternalError | exc.OperationalError
            )


def message_of(error: BaseException) -> str:
    """The server's message, without the numbers that drivers prepend and the SQL they append."""
    source: Any = getattr(error, "orig", None) or error
    inner = source.__cause__ or source
    text = str(inner.args[-1]) if inner.args else ""
    if isinstance(inner, OSError):
        text = inner.strerror or text
    return " ".join(text.split()).rstrip(".") or type(inner).__name__
