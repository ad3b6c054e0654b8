"""Every error has a status code and a problem document."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from atoll.api.rest.problems import invalid, problem, status_of
from atoll.errors import (
    AtollError,
    BlobsUnavailable,
    Conflict,
    CoordinationUnavailable,
    DatabaseUnavailable,
    Forbidden,
    InvalidRequest,
    NodeFull,
    NotFound,
    PermanentError,
    RequestError,
    SessionEnded,
    SpoolFull,
    TemporaryError,
    TooLarge,
    Unauthenticated,
)
from atoll.link.errors import LinkLost, RequestRefused

if TYPE_CHECKING:
    from starlette.responses import Response

STATUSES: dict[str, tuple[AtollError, int]] = {
    "invalid": (InvalidRequest("x"), 422),
    "not found": (NotFound("x"), 404),
    "conflict": (Conflict("x"), 409),
    "unauthenticated": (Unauthenticated("x"), 401),
    "forbidden": (Forbidden("x"), 403),
    "too large": (TooLarge("x"), 413),
    "temporary": (TemporaryError("x"), 503),
    "permanent": (PermanentError("x"), 500),
    "any request": (RequestError("x"), 400),
    "link lost": (LinkLost("x"), 503),
    "executor": (RequestRefused("x", code="odd"), 422),
    "bad path": (InvalidRequest("x", code="bad_path"), 400),
    "bad JSON": (InvalidRequest("x", code="bad_json"), 400),
    "bad cursor": (InvalidRequest("x", code="bad_cursor"), 400),
    "busy": (TemporaryError("x", code="session_busy"), 429),
    "disk full": (Conflict("x", code="disk_full"), 507),
    "node full": (NodeFull("x"), 507),
    "in flight": (TemporaryError("x", code="idempotency_in_flight"), 409),
    "preload": (PermanentError("x", code="preload_failed"), 422),
}


def content(response: Response) -> dict[str, object]:
    found: dict[str, object] = json.loads(bytes(response.body))
    return found


@pytest.mark.parametrize(("error", "status"), STATUSES.values(), ids=STATUSES.keys())
def test_an_error_has_its_status(error: AtollError, status: int) -> None:
    response = problem(error)

    assert status_of(error) == response.status_code == status
    assert content(response)["status"] == status
    assert content(response)["code"] == error.code


def test_a_problem_has_the_members_of_the_rfc_and_those_of_the_error() -> None:
    response = problem(SessionEnded("It has ended.", status_now="timeout"))

    assert response.headers["content-type"] == "application/problem+json"
    assert content(response) == {
        "type": "urn:atoll:problem:session_ended",
        "title": "Conflict",
        "status": 409,
        "detail": "It has ended.",
        "code": "session_ended",
        "status_now": "timeout",
    }


def test_a_temporary_error_has_retry_after() -> None:
    assert problem(TemporaryError("x", retry_after=4.6)).headers["retry-after"] == "5"
    assert problem(TemporaryError("x", retry_after=0.1)).headers["retry-after"] == "1"
    assert "retry-after" not in problem(Conflict("x")).headers


def test_a_missing_key_names_the_scheme() -> None:
    assert problem(Unauthenticated("x")).headers["www-authenticate"] == "Bearer"
    assert "www-authenticate" not in problem(Forbidden("x")).headers


def test_invalid_fields_are_listed_without_their_values() -> None:
    error = invalid(
        [
            {"loc": ("body", "env", "A"), "msg": "Value error, no", "type": "x", "input": "secret"},
            {"loc": ("body",), "msg": "whole", "type": "x"},
        ]
    )

    assert error.details["errors"] == [
        {"field": "env.A", "message": "no"},
        {"field": "", "message": "whole"},
    ]
    assert error.message == "env.A: no; whole"
    assert "secret" not in str(error.details)


def test_at_most_twenty_invalid_fields_are_listed() -> None:
    error = invalid([{"loc": ("body", n), "msg": "no", "type": "x"} for n in range(100)])

    assert len(error.details["errors"]) == 20


def test_a_body_that_is_not_json_has_a_code_of_its_own() -> None:
    assert invalid([{"loc": (), "msg": "no", "type": "json_invalid"}]).code == "bad_json"


@pytest.mark.parametrize(
    "kind", [DatabaseUnavailable, CoordinationUnavailable, BlobsUnavailable, SpoolFull]
)
def test_the_address_of_a_back_end_is_not_shown_to_clients(kind: type[AtollError]) -> None:
    response = problem(kind("10.0.0.7:3306: Access denied for 'atoll'"))
    assert json.loads(bytes(response.body))["code"] == kind.code
    assert b"10.0.0.7" not in bytes(response.body)


def test_a_temporary_error_and_a_conflict_with_the_same_code_have_their_own_status() -> None:
    assert problem(TemporaryError("Too many wait.", code="session_busy")).status_code == 429
    assert problem(Conflict("Something runs.", code="session_busy")).status_code == 409
