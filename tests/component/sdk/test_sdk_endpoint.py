from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from atoll import AsyncAtoll, Atoll, InvalidRequest, TemporaryError
from atoll.errors import Forbidden, Unauthenticated
from tests.component.sdk.fake_server import KEY, FakeServer, ServerThread, problem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[FakeServer]:
    """A server with TLS whose certificate is not trusted."""
    file = tmp_path / "server.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(file)
    fake_server = FakeServer()
    with ServerThread(fake_server, str(file)):
        yield fake_server


def refusal(url: str, **options: Any) -> str:
    with Atoll(url, **options) as atoll, pytest.raises(Unauthenticated) as raised:
        atoll.sessions.get("sess_1")
    return raised.value.message


def test_the_error_for_an_unknown_key_contains_its_source(
    fake_server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    assert f"There is no key file {file}." in refusal(fake_server.url, data_dir=tmp_path)
    file.write_text("kept-key\n")
    assert f"The key is from the file {file}." in refusal(fake_server.url, data_dir=tmp_path)
    monkeypatch.setenv("ATOLL_API_KEY", "a-key")
    assert "The key is from ATOLL_API_KEY." in refusal(fake_server.url, data_dir=tmp_path)
    assert "from the api_key argument" in refusal(fake_server.url, api_key="b-key")


def test_the_error_for_a_read_only_key_contains_its_source(
    fake_server: FakeServer, atoll: Atoll
) -> None:
    fake_server.failure = problem(403, "key_read_only", "This API key may only read.")
    with pytest.raises(Forbidden, match="from the api_key argument"):
        atoll.sessions.create()


def test_white_space_around_a_key_is_stripped(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Atoll(fake_server.url, api_key=f"  {KEY}\r\n") as atoll:
        assert list(atoll.sessions.list()) == []
    monkeypatch.setenv("ATOLL_API_KEY", f"{KEY}\n")
    with Atoll(fake_server.url) as atoll:
        assert list(atoll.sessions.list()) == []


@pytest.mark.parametrize("suffix", ["/", "/api/v1", "/api/v1/", " \n"])
def test_a_url_may_end_with_the_path_of_the_api(fake_server: FakeServer, suffix: str) -> None:
    with Atoll(fake_server.url + suffix, api_key=KEY) as atoll:
        assert list(atoll.sessions.list()) == []
        assert atoll.url == fake_server.url


@pytest.mark.parametrize("given", [{"url": 8000}, {"url": "http://a", "api_key": b"k"}])
def test_a_url_or_key_of_another_type_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="must be a string"):
        Atoll(**given)


def test_https_to_a_server_without_tls_suggests_the_right_url(fake_server: FakeServer) -> None:
    url = fake_server.url.replace("http", "https")
    with Atoll(url, api_key=KEY) as atoll, pytest.raises(InvalidRequest) as raised:
        atoll.sessions.get("sess_1")
    assert raised.value.code == "wrong_scheme"
    assert raised.value.message.endswith(f"does not use TLS. Use {fake_server.url}")


def test_http_to_a_server_with_tls_suggests_the_right_url(encrypted: FakeServer) -> None:
    url = encrypted.url.replace("https", "http")
    with Atoll(url, api_key=KEY) as atoll, pytest.raises(InvalidRequest) as raised:
        atoll.sessions.get("sess_1")
    assert raised.value.code == "wrong_scheme"
    assert raised.value.message.endswith(f"uses TLS. Use {encrypted.url}")


@pytest.mark.anyio
@pytest.mark.parametrize("server", ["fake_server", "encrypted"])
async def test_a_console_with_the_wrong_scheme_suggests_the_right_url(
    server: str, request: pytest.FixtureRequest
) -> None:
    fake_server: FakeServer = request.getfixturevalue(server)
    scheme, right = ("https", "http") if server == "fake_server" else ("http", "https")
    async with AsyncAtoll(fake_server.url.replace(right, scheme), api_key=KEY) as atoll:
        with pytest.raises(InvalidRequest, match=fake_server.url):
            async with atoll.execution("exec_1").console():
                pass


def test_the_error_for_a_proxy_that_expects_https_suggests_the_right_url(
    fake_server: FakeServer, atoll: Atoll
) -> None:
    fake_server.failure = problem(
        400, "bad_request", "The plain HTTP request went to an HTTPS port"
    )
    fake_server.failure.headers["content-type"] = "text/html"
    with pytest.raises(InvalidRequest, match="uses TLS"):
        atoll.sessions.get("sess_1")
    fake_server.failure = problem(308, "moved")
    fake_server.failure.headers["location"] = fake_server.url.replace("http", "https")
    with pytest.raises(InvalidRequest, match="uses TLS"):
        atoll.sessions.get("sess_1")


def test_an_untrusted_certificate_is_reported_as_such(encrypted: FakeServer) -> None:
    with Atoll(encrypted.url, api_key=KEY) as atoll, pytest.raises(TemporaryError) as raised:
        atoll.sessions.get("sess_1")
    assert raised.value.code == "certificate_untrusted"


def test_an_error_is_one_short_traceback(nowhere: str) -> None:
    with Atoll(nowhere, api_key=KEY) as atoll, pytest.raises(TemporaryError) as raised:
        atoll.sessions.get("sess_1")
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("Traceback") == 1
    assert "httpx" not in shown
    assert shown.count("  File ") <= 5
    assert "refused" in shown or "All connection attempts failed" in shown
