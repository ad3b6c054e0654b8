"""What requests are about, by method and path."""

from __future__ import annotations

import pytest

from atoll.api.rest.destinations import Kind, about
from atoll.api.rest.passage import passed_on


@pytest.mark.parametrize(
    ("method", "path", "kind", "needs_it", "falls_back"),
    [
        ("POST", "/sessions", Kind.CREATE, False, False),
        ("POST", "/sessions/s/clone", Kind.CLONE, False, False),
        ("POST", "/sessions/s/execute", Kind.SESSION, True, False),
        ("POST", "/sessions/s/start", Kind.SESSION, True, False),
        ("POST", "/sessions/s/stop", Kind.SESSION, False, False),
        ("POST", "/sessions/s/archive", Kind.SESSION, False, False),
        ("PATCH", "/sessions/s", Kind.SESSION, False, False),
        ("DELETE", "/sessions/s", Kind.SESSION, False, True),
        ("DELETE", "/sessions/s/files/a", Kind.SESSION, True, False),
        ("PUT", "/sessions/s/files/executions", Kind.SESSION, True, False),
        ("GET", "/sessions/s/files/executions", Kind.SESSION, True, True),
        ("HEAD", "/sessions/s/files/a/b", Kind.SESSION, True, True),
        ("POST", "/sessions/s/checkpoint", Kind.SESSION, True, False),
        ("GET", "/sessions/s/dependencies/log", Kind.SESSION, True, True),
        ("GET", "/executions/s", Kind.EXECUTION, False, True),
        ("GET", "/executions/s/events", Kind.EXECUTION, False, True),
        ("POST", "/executions/s/cancel", Kind.EXECUTION, False, False),
        ("POST", "/invocations", Kind.INVOKE, True, False),
        ("GET", "/invocations/s", Kind.INVOCATION, False, True),
        ("POST", "/invocations/s/cancel", Kind.INVOCATION, False, False),
        ("GET", "/signed/s", Kind.SIGNED, True, True),
        ("PUT", "/signed/s", Kind.SIGNED, True, False),
    ],
)
def test_a_request_is_about_one_thing(
    method: str, path: str, kind: Kind, needs_it: bool, falls_back: bool
) -> None:
    found = about(method, f"/api/v1{path}")
    assert found is not None
    assert found.id == ("" if kind in (Kind.CREATE, Kind.INVOKE) else "s")
    assert (found.kind, found.needs_it, found.falls_back) == (kind, needs_it, falls_back)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/sessions"),
        ("GET", "/api/v1/sessions/s"),
        ("GET", "/api/v1/sessions/s/executions"),
        ("GET", "/api/v1/sessions/s/artifacts"),
        ("GET", "/api/v1/sessions/s/secrets"),
        ("GET", "/api/v1/sessions/s/checkpoint"),
        ("HEAD", "/api/v1/sessions/s/dependencies"),
        ("GET", "/api/v1/executions"),
        ("GET", "/api/v1/invocations"),
        ("GET", "/api/v1/invocations/s/executions"),
        ("POST", "/api/v1/sessions/"),
        ("POST", "/api/v1/sessions//execute"),
        ("POST", "/api/v1/templates"),
        ("POST", "/api/v1/nodes/n/drain"),
        ("GET", "/health"),
        ("POST", "/api/v2/sessions"),
        ("POST", "/internal/reports"),
    ],
)
def test_what_the_database_answers_is_about_nothing(method: str, path: str) -> None:
    assert about(method, path) is None


def test_headers_of_the_connection_stay_where_they_are() -> None:
    kept = [(b"authorization", b"Bearer k"), (b"content-length", b"5"), (b"x-own", b"1")]
    dropped = [
        (b"connection", b"keep-alive, X-Hop"),
        (b"x-hop", b"1"),
        (b"keep-alive", b"5"),
        (b"transfer-encoding", b"chunked"),
        (b"upgrade", b"h2c"),
        (b"te", b"trailers"),
        (b"expect", b"100-continue"),
        (b"origin", b"https://page.example"),
        (b"atoll-hop", b"of somebody"),
    ]
    assert passed_on([*dropped, *kept]) == kept
