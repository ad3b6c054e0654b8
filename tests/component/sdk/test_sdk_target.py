from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from atoll import AsyncAtoll, Atoll, InvalidRequest, TemporaryError
from atoll.errors import Forbidden, Unauthenticated
from tests.component.sdk.outside import KEY, Outside, ServerThread, problem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[Outside]:
    """A server with TLS whose certificate is not trusted."""
    file = tmp_path / "server.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(file)
    outside = Outside()
    with ServerThread(outside, str(file)):
        yield outside


def refusal(url: str, **given: Any) -> str:
    with Atoll(url, **given) as atoll, pytest.raises(Unauthenticated) as raised:
        atoll.sessions.get("sess_1")
    return raised.value.message


def test_an_unknown_key_is_named_by_where_it_comes_from(
    outside: Outside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    assert f"There is no key file {file}." in refusal(outside.url, data_dir=tmp_path)
    file.write_text("kept-key\n")
    assert f"The key is from the file {file}." in refusal(outside.url, data_dir=tmp_path)
    monkeypatch.setenv("ATOLL_API_KEY", "a-key")
    assert "The key is from ATOLL_API_KEY." in refusal(outside.url, data_dir=tmp_path)
    assert "from the api_key argument" in refusal(outside.url, api_key="b-key")


def test_a_key_that_may_only_read_is_named_by_where_it_comes_from(
    outside: Outside, atoll: Atoll
) -> None:
    outside.failure = problem(403, "key_read_only", "This API key may only read.")
    with pytest.raises(Forbidden, match="from the api_key argument"):
        atoll.sessions.create()


def test_white_space_around_a_key_is_stripped(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Atoll(outside.url, api_key=f"  {KEY}\r\n") as atoll:
        assert list(atoll.sessions.list()) == []
    monkeypatch.setenv("ATOLL_API_KEY", f"{KEY}\n")
    with Atoll(outside.url) as atoll:
        assert list(atoll.sessions.list()) == []


@pytest.mark.parametrize("suffix", ["/", "/api/v1", "/api/v1/", " \n"])
def test_a_url_may_end_like_the_address_of_the_api(outside: Outside, suffix: str) -> None:
    with Atoll(outside.url + suffix, api_key=KEY) as atoll:
        assert list(atoll.sessions.list()) == []
        assert atoll.url == outside.url


@pytest.mark.parametrize("given", [{"url": 8000}, {"url": "http://a", "api_key": b"k"}])
def test_a_url_or_key_of_another_type_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="must be a string"):
        Atoll(**given)


def test_https_to_a_server_without_tls_names_the_right_url(outside: Outside) -> None:
    url = outside.url.replace("http", "https")
    with Atoll(url, api_key=KEY) as atoll, pytest.raises(InvalidRequest) as raised:
        atoll.sessions.get("sess_1")
    assert raised.value.code == "wrong_scheme"
    assert raised.value.message.endswith(f"does not use TLS. Use {outside.url}")


def test_http_to_a_server_with_tls_names_the_right_url(encrypted: Outside) -> None:
    url = encrypted.url.replace("https", "http")
    with Atoll(url, api_key=KEY) as atoll, pytest.raises(InvalidRequest) as raised:
        atoll.sessions.get("sess_1")
    assert raised.value.code == "wrong_scheme"
    assert raised.value.message.endswith(f"uses TLS. Use {encrypted.url}")


@pytest.mark.anyio
@pytest.mark.parametrize("server", ["outside", "encrypted"])
async def test_a_console_with_the_wrong_scheme_names_the_right_url(
    server: str, request: pytest.FixtureRequest
) -> None:
    outside: Outside = request.getfixturevalue(server)
    scheme, right = ("https", "http") if server == "outside" else ("http", "https")
    async with AsyncAtoll(outside.url.replace(right, scheme), api_key=KEY) as atoll:
        with pytest.raises(InvalidRequest, match=outside.url):
            async with atoll.execution("exec_1").console():
                pass


def test_a_proxy_that_asks_for_https_is_an_error_that_names_the_right_url(
    outside: Outside, atoll: Atoll
) -> None:
    outside.failure = problem(400, "bad_request", "The plain HTTP request went to an HTTPS port")
    outside.failure.headers["content-type"] = "text/html"
    with pytest.raises(InvalidRequest, match="uses TLS"):
        atoll.sessions.get("sess_1")
    outside.failure = problem(308, "moved")
    outside.failure.headers["location"] = outside.url.replace("http", "https")
    with pytest.raises(InvalidRequest, match="uses TLS"):
        atoll.sessions.get("sess_1")


def test_a_certificate_that_is_not_trusted_is_said_to_be_one(encrypted: Outside) -> None:
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
