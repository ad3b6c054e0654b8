"""
What an error of a database server means.

Beyond its message, it matters what became of the transaction. `Unreached`: there was no connection,
so nothing happened. `Refused`: the server takes none of its kind for now. `RolledBack`: the server
undid it. `Lost`: nobody knows, a commit may have been under way. The errors of SQLAlchemy and of
the drivers end here.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import exc

from atoll.errors import AtollError, DatabaseUnavailable, InvalidRequest, TemporaryError, TooLarge

# What the server undid by itself: deadlock, serialisation, a wait for a lock or a statement that
# took too long.
ROLLED_BACK = {"40001", "40P01", "55P03", "57014", 1205, 1213, 1969, 3024}
# A secondary that was not made the primary.
READ_ONLY = {"25006", 1290, 1792, 1836}
# No room: connections, memory, disk.
EXHAUSTED = {"53000", "53100", "53200", "53300", 1021, 1040, 1041, 1114, 1203, 1226}
PACKET_TOO_LARGE = 1153
# Numbers of MariaDB's from 2000 on are the driver's: connections that broke or never were.
SHUTTING_DOWN = {1053, 1077, 1079, 1080, 1152, 1158, 1159, 1160, 1161, 1184, 1927}
TAKEN = {"23505", 1062}
# Text that is too long or that the server does not take, numbers out of range.
VALUES = {"22000", "22001", "22003", "22021", "22P05", 1264, 1366, 1406}


class Unreached(DatabaseUnavailable):
    """No connection could be made, so nothing was done."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after=5.0)


class Refused(DatabaseUnavailable):
    """The server answered that it cannot serve this connection or statement now."""


class RolledBack(DatabaseUnavailable):
    """The server rolled the transaction back; it may be repeated."""


class Lost(DatabaseUnavailable):
    """The connection broke during a statement, which may or may not have been done."""


def number(error: BaseException) -> str | int | None:
    """MariaDB's number of the error, or the SQLSTATE that PostgreSQL gave."""
    source: Any = getattr(error, "orig", None) or error
    first = source.args[0] if source.args else None
    if isinstance(first, int) and not isinstance(source, OSError):
        return first
    state = getattr(source, "sqlstate", None)
    return None if state is None else str(state)


def usable(error: BaseException) -> bool:
    """Whether the connection is as good as before the statement, after a rollback."""
    if isinstance(error, exc.DBAPIError):
        found = number(error)
        return found in TAKEN | VALUES | ROLLED_BACK or (
            isinstance(error, exc.IntegrityError | exc.ProgrammingError | exc.DataError)
            and not error.connection_invalidated
        )
    return isinstance(error, Exception) and not isinstance(
        error, exc.SQLAlchemyError | OSError | EOFError | TemporaryError
    )


def translate(error: Exception, name: str) -> Exception:
    """The error of our families that says what `error` means; itself where it is a defect."""
    found = number(error)
    words = said(error)
    translated: Exception
    match error:
        case AtollError():
            return error
        case UnicodeEncodeError():
            translated = InvalidRequest("An id or a name holds half of a surrogate pair.")
        case exc.TimeoutError():
            # Neither tried again nor taken for an outage: it would only make the queue longer.
            translated = DatabaseUnavailable(
                f"All connections to the database {name} are in use; raise database.pool_size or "
                "database.max_overflow.",
                retry_after=5.0,
            )
        case _ if found in ROLLED_BACK:
            translated = RolledBack(f"The database {name} undid a transaction: {words}.")
        case _ if found in VALUES or isinstance(error, exc.DataError):
            translated = InvalidRequest(f"The database does not take a value: {words}.")
        case _ if found == PACKET_TOO_LARGE:
            translated = TooLarge(
                "This is more than the database takes at once; raise its max_allowed_packet."
            )
        case _ if found in READ_ONLY:
            translated = Refused(
                f"The database {name} takes no writes: {words}. Is it a secondary?"
            )
        case _ if found in EXHAUSTED:
            translated = Refused(f"The database {name} has no room: {words}.")
        case TimeoutError():
            translated = Lost(f"The database {name} does not answer in time.")
        case _ if _broken(error):
            translated = Lost(f"The connection to the database {name} broke: {words}.")
        case _:
            return error
    translated.__cause__ = error
    return translated


def _broken(error: Exception) -> bool:
    if isinstance(error, OSError | EOFError):
        return True
    if not isinstance(error, exc.DBAPIError):
        return False
    match number(error):
        case int() as found:
            return found >= 2000 or found in SHUTTING_DOWN
        case str() as state:
            return state[:2] in ("08", "57", "XX")
        case _:
            return error.connection_invalidated or isinstance(
                error, exc.InterfaceError | exc.InternalError | exc.OperationalError
            )


def said(error: BaseException) -> str:
    """The words of the server, without the numbers that drivers put before and the SQL after."""
    source: Any = getattr(error, "orig", None) or error
    inner = source.__cause__ or source
    text = str(inner.args[-1]) if inner.args else ""
    if isinstance(inner, OSError):
        text = inner.strerror or text
    return " ".join(text.split()).rstrip(".") or type(inner).__name__
