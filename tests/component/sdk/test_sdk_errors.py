from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

import atoll.errors as errors
from atoll import Atoll, AtollError, InvalidRequest, PermanentError, TemporaryError
from atoll.sdk.decode import decode
from atoll.sdk.error_response import error_from_response
from atoll.sdk.values import SessionInfo
from tests.component.sdk.fake_server import KEY, problem

if TYPE_CHECKING:
    from pathlib import Path

    from tests.component.sdk.fake_server import FakeServer


@pytest.mark.parametrize(
    ("status", "family"),
    [
        (400, errors.InvalidRequest),
        (401, errors.Unauthenticated),
        (403, errors.Forbidden),
        (404, errors.NotFound),
        (405, errors.RequestError),
        (409, errors.Conflict),
        (413, errors.TooLarge),
        (422, errors.InvalidRequest),
        (429, errors.TemporaryError),
        (500, errors.PermanentError),
        (502, errors.TemporaryError),
        (503, errors.TemporaryError),
    ],
)
def test_a_problem_document_becomes_the_matching_exception(
    atoll: Atoll, fake_server: FakeServer, status: int, family: type[AtollError]
) -> None:
    fake_server.failure = problem(status, "some_code", "What happened.", field="x", message="m")
    with pytest.raises(family) as raised:
        atoll.sessions.get("sess_1")
    error = raised.value
    assert type(error) is family
    assert error.message.startswith("What happened.")
    assert error.code == "some_code"
    assert error.details == {"field": "x", "message": "m"}
    if isinstance(error, TemporaryError):
        assert error.retry_after == (1.0 if status == 502 else 7.0)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"detail": null}'])
def test_an_error_without_a_problem_document_is_raised_too(body: bytes) -> None:
    error = error_from_response(500, {}, body)
    assert isinstance(error, PermanentError)
    assert "500" in error.message


def test_an_unreachable_server_is_a_temporary_error_with_its_url(nowhere: str) -> None:
    with (
        Atoll(nowhere, api_key=KEY) as atoll,
        pytest.raises(TemporaryError, match=nowhere) as raised,
    ):
        atoll.sessions.get("sess_1")
    assert raised.value.code == "server_unreachable"


def test_a_silent_server_causes_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            Atoll(url, api_key=KEY, timeout=0.05) as atoll,
            pytest.raises(TemporaryError) as raised,
        ):
            atoll.sessions.get("sess_1")
    assert raised.value.code == "server_timeout"


def test_an_unexpected_response_is_a_permanent_error() -> None:
    with pytest.raises(PermanentError, match="SessionInfo") as raised:
        decode(SessionInfo, {"id": "sess_1"})
    assert raised.value.code == "bad_answer"


@pytest.mark.parametrize(
    "event", [{"x": object()}, float("nan"), "\ud800"], ids=["object", "nan", "surrogate"]
)
def test_an_event_that_is_not_json_is_refused_before_it_is_sent(
    atoll: Atoll, event: object
) -> None:
    with atoll.session() as session, pytest.raises(InvalidRequest) as raised:
        session.run("x", event=event)
    assert raised.value.code == "not_json"


def test_the_key_is_the_argument_else_the_variable_else_the_key_file(
    fake_server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_server.key = None

    def sent(**options: str) -> str | None:
        with Atoll(fake_server.url, **options) as atoll:  # type: ignore[arg-type]
            list(atoll.sessions.list())
        return fake_server.headers.get("authorization")

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "nothing"))
    assert sent() is None
    (tmp_path / "key").write_text("kept-key\n")
    assert sent(data_dir=str(tmp_path)) == "Bearer kept-key"
    monkeypatch.setenv("ATOLL_DATA_DIR", str(tmp_path))
    assert sent() == "Bearer kept-key"
    monkeypatch.setenv("ATOLL_API_KEY", "key-of-the-environment")
    assert sent() == "Bearer key-of-the-environment"
    assert sent(api_key="given") == "Bearer given"


def test_the_key_file_is_used_only_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.sdk.endpoint import resolve_endpoint

    (tmp_path / "key").write_text("kept-key")
    for url in ("http://localhost:1", "http://127.8.9.1", "https://[::1]:8000/"):
        assert resolve_endpoint(url, None, tmp_path, {}).key == "kept-key"
    for url in ("http://example.org", "http://127.0.0.1.example.org", "http://10.0.0.1"):
        assert resolve_endpoint(url, None, tmp_path, {}).key is None


def test_a_proxy_of_the_environment_is_not_used_for_this_machine(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with Atoll(fake_server.url, api_key=KEY) as atoll:
        assert list(atoll.sessions.list()) == []


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"url": "http://127.0.0.1:1", "pool": {"size": 1}}, "settings_need_embedded"),
        ({"api_key": "a-key"}, "no_url"),
        ({"url": "127.0.0.1:8000"}, "invalid_url"),
        ({"url": "ftp://127.0.0.1"}, "invalid_url"),
        ({"url": ""}, "invalid_url"),
        ({"url": "http://127.0.0.1:99999"}, "invalid_url"),
        ({"url": "http://example.org", "api_key": "a\nb"}, "invalid_key"),
    ],
)
def test_contradictory_arguments_are_refused_at_once(given: dict[str, object], code: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        Atoll(**given)  # type: ignore[arg-type]
    assert raised.value.code == code
