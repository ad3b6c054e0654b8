"""Refusals of an executor become exceptions of the family that clients get."""

from __future__ import annotations

import pytest

from atoll.errors import (
    AtollError,
    Conflict,
    InvalidRequest,
    NotFound,
    TemporaryError,
    TooLarge,
)
from atoll.link.errors import (
    ContextUnavailable,
    ExecutorError,
    QueueFull,
    RequestRefused,
    StdinFull,
    refusal,
)

FAMILIES = (Conflict, InvalidRequest, NotFound, TemporaryError, TooLarge)


@pytest.mark.parametrize(
    ("operation", "code", "family", "public_code"),
    [
        ("stat", "file_not_found", NotFound, "file_not_found"),
        ("write", "precondition_failed", Conflict, "precondition_failed"),
        ("unpack", "disk_full", Conflict, "disk_full"),
        ("pack", "too_large", TooLarge, "too_large"),
        ("follow", "executor_busy", TemporaryError, "session_crowded"),
        ("list", "bad_path", InvalidRequest, "bad_path"),
        ("context_restart", "context_not_found", NotFound, "context_not_found"),
        ("context_create", "too_many_contexts", Conflict, "too_many_contexts"),
        ("run", "context_busy", Conflict, "context_busy"),
        ("run", "run_is_over", InvalidRequest, "run_is_over"),
        ("run", "executor_busy", InvalidRequest, "executor_busy"),
        ("stdin", "invented", InvalidRequest, "invented"),
    ],
)
def test_a_refusal_has_the_family_and_the_code_of_the_api(
    operation: str, code: str, family: type[AtollError], public_code: str
) -> None:
    error = refusal(operation, code, "why")

    assert isinstance(error, ExecutorError)
    assert [kind for kind in FAMILIES if isinstance(error, kind)] == [family]
    assert (error.code, error.message) == (public_code, "why")


def test_a_full_disk_during_a_restore_is_not_a_conflict() -> None:
    assert isinstance(refusal("populate", "disk_full", "why"), RequestRefused)


def test_queued_input_and_queued_messages_have_distinct_errors() -> None:
    assert isinstance(refusal("stdin", "stdin_full", "why"), StdinFull)
    assert not isinstance(refusal("message", "queue_full", "why"), StdinFull)
    assert isinstance(refusal("message", "queue_full", "why"), QueueFull)


def test_a_context_that_cannot_run_is_one_kind_of_refusal() -> None:
    for code in ("context_not_found", "context_dead", "context_busy"):
        assert isinstance(refusal("run", code, "why"), ContextUnavailable)
    assert not isinstance(refusal("run", "context_failed", "why"), ContextUnavailable)
