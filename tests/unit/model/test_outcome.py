"""How the outcome of an execution follows from reports of the kernel and the process."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.model.execution import RESULT_STATUS, ExecutionStatus
from atoll.model.outcome import conclude, without_result
from atoll.model.session import Cause

VALUE = b'{"a":1}'
SAID = {"code": "exception", "message": "no", "name": "ValueError"}


def outcome_of(
    raw: dict[str, Any],
    value: bytes | None = None,
    error: dict[str, Any] | None = None,
    out_of_memory: bool = False,
) -> Any:
    return conclude(
        raw,
        stdout=b"out",
        stderr=b"err",
        return_json=value,
        error=error,
        out_of_memory=out_of_memory,
    )


# The report, then status, cause, exit code, signal, code of the error, whether the value counts.
ENDS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "exit 0": ({"raw": {"exit_code": 0}}, ("completed", None, 0, None, None, False)),
    "exit 0 with a value": (
        {"raw": {"exit_code": 0}, "value": VALUE},
        ("completed", None, 0, None, None, True),
    ),
    "exit 0 with an error": (
        {"raw": {"exit_code": 0}, "error": SAID},
        ("failed", "exit", 0, None, "exception", False),
    ),
    "exit 3": ({"raw": {"exit_code": 3}}, ("failed", "exit", 3, None, "exit", False)),
    "exit 1 with an error": (
        {"raw": {"exit_code": 1}, "error": SAID},
        ("failed", "exit", 1, None, "exception", False),
    ),
    "exit 1 with a value": (
        {"raw": {"exit_code": 1}, "value": VALUE},
        ("failed", "exit", 1, None, "exit", False),
    ),
    "SIGSEGV": (
        {"raw": {"exit_code": None, "signal": 11}},
        ("failed", "signal", 139, "SIGSEGV", "signal", False),
    ),
    "a signal without a name": (
        {"raw": {"exit_code": None, "signal": 99}},
        ("failed", "signal", 227, "SIG99", "signal", False),
    ),
    "a signal with a value": (
        {"raw": {"exit_code": None, "signal": 9}, "value": VALUE},
        ("failed", "signal", 137, "SIGKILL", "signal", False),
    ),
    "killed for memory": (
        {"raw": {"exit_code": None, "signal": 9}, "out_of_memory": True},
        ("failed", "oom", 137, "SIGKILL", "oom", False),
    ),
    "a child killed for memory": (
        {"raw": {"exit_code": 1}, "out_of_memory": True},
        ("failed", "oom", 1, None, "oom", False),
    ),
    "a child killed for memory, and a good end": (
        {"raw": {"exit_code": 0}, "value": VALUE, "out_of_memory": True},
        ("completed", None, 0, None, None, True),
    ),
    "timeout": (
        {"raw": {"signal": 9, "reason": "timeout"}, "value": VALUE},
        ("timeout", "timeout", 124, "SIGKILL", "timeout", False),
    ),
    "timeout that ended well all the same": (
        {"raw": {"exit_code": 0, "reason": "timeout"}},
        ("timeout", "timeout", 124, None, "timeout", False),
    ),
    "cancelled": (
        {"raw": {"signal": 15, "reason": "cancelled"}},
        ("cancelled", "user", 143, "SIGTERM", "cancelled", False),
    ),
    "watched memory": (
        {"raw": {"signal": 9, "reason": "memory"}},
        ("failed", "oom", 137, "SIGKILL", "oom", False),
    ),
    "watched disk": (
        {"raw": {"signal": 9, "reason": "disk"}},
        ("failed", "disk", 137, "SIGKILL", "disk", False),
    ),
}


@pytest.mark.parametrize(("said", "expected"), ENDS.values(), ids=ENDS.keys())
def test_the_outcome_of_an_execution_is_derived_from_its_exit(
    said: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    outcome = outcome_of(**said)

    assert (
        outcome.status,
        outcome.cause,
        outcome.exit_code,
        outcome.signal,
        outcome.error and outcome.error["code"],
        outcome.return_json is not None,
    ) == expected
    assert (outcome.error is None) == (outcome.status is ExecutionStatus.COMPLETED)


def test_output_that_was_not_truncated_has_its_own_length() -> None:
    outcome = outcome_of({"exit_code": 0})

    assert (outcome.stdout, outcome.stdout_size) == (b"out", 3)
    assert (outcome.stderr, outcome.stderr_size) == (b"err", 3)


def test_sizes_and_usage_are_converted_to_their_units() -> None:
    outcome = outcome_of(
        {
            "exit_code": 0,
            "duration": 1.23456789,
            "sizes": {"1": 1000, "2": 2000},
            "usage": {"cpu": 0.5, "peak": 3 * 2**20, "read": 7, "written": 8},
            "artifacts_cut": True,
        }
    )

    assert (outcome.stdout_size, outcome.stderr_size) == (1000, 2000)
    assert outcome.execution_time == 1.234568
    assert outcome.metrics == {
        "duration_ms": 1234.568,
        "cpu_time_ms": 500.0,
        "peak_memory_mb": 3.0,
        "bytes_read": 7,
        "bytes_written": 8,
    }
    assert outcome.artifacts_truncated is True


def test_the_type_of_an_artifact_follows_from_its_name() -> None:
    item = {"path": "a/b.csv", "size": 3, "modified": 1_700_000_000_123_456_789, "sha256": "ab"}
    outcome = outcome_of({"exit_code": 0, "artifacts": [item, {**item, "path": "unknown"}]})

    csv, unknown = outcome.artifacts
    assert (csv.path, csv.size, csv.mime_type, csv.checksum) == ("a/b.csv", 3, "text/csv", "ab")
    assert csv.created_at.isoformat() == "2023-11-14T22:13:20.123456+00:00"
    assert unknown.mime_type == "application/octet-stream"


def test_a_lost_attempt_keeps_the_output_received() -> None:
    outcome = without_result(
        ExecutionStatus.CRASHED, Cause.INSTANCE_LOST, "It went.", stdout=b"abc", stderr=b""
    )

    assert (outcome.status, outcome.exit_code, outcome.stdout_size) == ("crashed", None, 3)
    assert outcome.error == {"code": "instance_lost", "message": "It went."}
    assert outcome.metrics == {}


def test_every_final_status_has_a_result_status() -> None:
    assert set(RESULT_STATUS) == {status for status in ExecutionStatus if status.ended}
    assert set(RESULT_STATUS.values()) == {"success", "failed", "timeout", "error"}
