"""What SQLite's errors are called outside; each is a real one."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from atoll.errors import PermanentError, TemporaryError
from atoll.stores.sql.sqlite.engine import translate

if TYPE_CHECKING:
    from pathlib import Path


def failure(database: str, *statements: str, uri: bool = False) -> sqlite3.Error:
    try:
        with closing(sqlite3.connect(database, isolation_level=None, uri=uri)) as connection:
            for statement in statements:
                connection.execute(statement)
    except sqlite3.Error as error:
        return error
    pytest.fail("SQLite found nothing wrong.")


def test_a_full_disk_is_reported_as_full() -> None:
    error = failure(
        ":memory:",
        "CREATE TABLE t (x)",
        "PRAGMA max_page_count = 3",
        "INSERT INTO t VALUES (zeroblob(100000))",
    )

    translated = translate(error, "atoll.db")

    assert isinstance(translated, TemporaryError)
    assert translated.code == "database_unavailable"
    assert "atoll.db is full" in translated.message
    assert translated.__cause__ is error


def test_a_read_only_database_is_reported_as_read_only(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()
    error = failure(f"file:{tmp_path}/a.db?mode=ro", "CREATE TABLE t (x)", uri=True)

    translated = translate(error, "atoll.db")

    assert isinstance(translated, TemporaryError)
    assert "may not write to" in translated.message


def test_a_missing_directory_is_reported_as_unavailable(tmp_path: Path) -> None:
    translated = translate(failure(f"{tmp_path}/none/a.db"), "atoll.db")

    assert isinstance(translated, TemporaryError)
    assert "cannot be opened" in translated.message


def test_a_file_that_is_not_a_database_is_reported_as_damaged(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"no database" * 1000)

    translated = translate(failure(f"{tmp_path}/a.db", "CREATE TABLE t (x)"), "atoll.db")

    assert isinstance(translated, PermanentError)
    assert translated.code == "database_damaged"


def test_an_error_of_our_own_is_not_translated() -> None:
    error = failure(":memory:", "CREATE TABLE t (x NOT NULL)", "INSERT INTO t VALUES (NULL)")

    assert translate(error, "atoll.db") is error
