"""What a request concerns, by method and path, and which headers are forwarded."""

from __future__ import annotations

import pytest

from atoll.api.rest.forwarding.proxy import forwarded_headers
from atoll.api.rest.forwarding.route_target import TargetKind, target_of_request


@pytest.mark.parametrize(
    ("method", "path", "kind", "needs_instance", "falls_back"),
    [
        ("POST", "/sessions", TargetKind.CREATE, False, False),
        ("POST", "/sessions/s/clone", TargetKind.CLONE, False, False),
        ("POST", "/sessions/s/execute", TargetKind.SESSION, True, False),
        ("POST", "/sessions/s/start", TargetKind.SESSION, True, False),
        ("POST", "/sessions/s/stop", TargetKind.SESSION, False, False),
        ("POST", "/sessions/s/archive", TargetKind.SESSION, False, False),
        ("PATCH", "/sessions/s", TargetKind.SESSION, False, False),
        ("DELETE", "/sessions/s", TargetKind.SESSION, False, True),
        ("DELETE", "/sessions/s/files/a", TargetKind.SESSION, True, False),
        ("PUT", "/sessions/s/files/executions", TargetKind.SESSION, True, False),
        ("GET", "/sessions/s/files/executions", TargetKind.SESSION, True, True),
        ("HEAD", "/sessions/s/files/a/b", TargetKind.SESSION, True, True),
        ("POST", "/sessions/s/checkpoint", TargetKind.SESSION, True, False),
        ("GET", "/sessions/s/dependencies/log", TargetKind.SESSION, True, True),
        ("GET", "/executions/s", TargetKind.EXECUTION, False, True),
        ("GET", "/executions/s/events", TargetKind.EXECUTION, False, True),
        ("POST", "/executions/s/cancel", TargetKind.EXECUTION, False, False),
        ("POST", "/invocations", TargetKind.INVOKE, True, False),
        ("GET", "/invocations/s", TargetKind.INVOCATION, False, True),
        ("POST", "/invocations/s/cancel", TargetKind.INVOCATION, False, False),
        ("GET", "/signed/s", TargetKind.SIGNED, True, True),
        ("PUT", "/signed/s", TargetKind.SIGNED, True, False),
    ],
)
def test_a_request_concerns_one_thing(
    method: str, path: str, kind: TargetKind, needs_instance: bool, falls_back: bool
) -> None:
    found = target_of_request(method, f"/api/v1{path}")
    assert found is not None
    assert found.id == ("" if kind in (TargetKind.CREATE, TargetKind.INVOKE) else "s")
    assert (found.kind, found.needs_instance, found.falls_back) == (
        kind,
        needs_instance,
        falls_back,
    )


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
def test_requests_that_the_database_serves_are_not_forwarded(method: str, path: str) -> None:
    assert target_of_request(method, path) is None


def test_hop_by_hop_headers_are_not_forwarded() -> None:
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
    assert forwarded_headers([*dropped, *kept]) == kept
