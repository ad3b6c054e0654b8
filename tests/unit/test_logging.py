"""Logs are events; what was in memory when something broke stays out of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import structlog

from atoll.app.logs import configure_logging

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def reset_logging() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def fail() -> None:
    password = "hunter2-in-memory"
    raise ValueError(f"broke with {len(password)}")


@pytest.mark.parametrize("as_json", [False, True], ids=["for people", "as JSON"])
def test_a_logged_error_does_not_show_local_variables(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    configure_logging("info", as_json=as_json)
    try:
        fail()
    except ValueError as error:
        structlog.get_logger("test").error("it.broke", execution_id="exec_1", exc_info=error)
    logged = capsys.readouterr().err

    assert "it.broke" in logged
    assert "broke with 17" in logged
    assert "hunter2-in-memory" not in logged.replace('password = "hunter2-in-memory"', "")
    if as_json:
        line = json.loads(logged)
        assert (line["event"], line["level"], line["execution_id"]) == (
            "it.broke", "error", "exec_1",
        )  # fmt: skip


def test_events_below_the_level_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", as_json=True)
    log = structlog.get_logger("test")
    log.info("quiet")
    log.warning("loud")

    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["loud"]
