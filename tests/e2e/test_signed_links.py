"""Links without a key, for one file and one method, with an expiry."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness import Server

pytestmark = pytest.mark.quick


@pytest.fixture
def stranger() -> Iterator[httpx.Client]:
    """A client without a key."""
    with httpx.Client(timeout=30) as http:
        yield http


def presign(api: Api, session: str, path: str = "a", **fields: Any) -> dict[str, Any]:
    url = f"{V1}/sessions/{session}/files/presign"
    return answer(api.http.post(url, json={"path": path, **fields}))


def test_a_file_is_downloaded_without_a_key(
    api: Api, session: str, stranger: httpx.Client, server: Server
) -> None:
    api.put(session, "dir/page.html", b"<script>0123456789")
    link = presign(api, session, "dir/page.html", filename="other.html")

    assert link["url"].startswith(f"{server.url}/api/v1/signed/")
    assert (link["method"], link["native"], link["complete_url"]) == ("GET", False, None)
    response = stranger.get(link["url"])
    assert response.content == b"<script>0123456789"
    assert response.headers["content-disposition"] == "attachment; filename*=UTF-8''other.html"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-security-policy"].startswith("sandbox")
    assert response.headers["referrer-policy"] == "no-referrer"
    assert "set-cookie" not in response.headers
    part = stranger.get(link["url"], headers={"Range": "bytes=-3"})
    assert (part.status_code, part.content) == (206, b"789")
    assert stranger.head(link["url"]).headers["content-length"] == "18"
    known = stranger.get(link["url"], headers={"If-None-Match": response.headers["etag"]})
    assert known.status_code == 304


def test_a_file_is_uploaded_without_a_key(api: Api, session: str, stranger: httpx.Client) -> None:
    link = presign(api, session, "in/file", method="PUT", direct=True)
    put = stranger.put(link["url"], content=(b"x" * 1000 for _ in range(1000)))

    assert answer(put, 201)["size"] == 1_000_000
    assert link["native"] is False
    assert api.run(session, "print(len(open('in/file').read()))")["stdout"] == "1000000\n"


def test_a_link_is_valid_for_one_method(api: Api, session: str, stranger: httpx.Client) -> None:
    api.put(session, "a", b"kept")
    get, put = presign(api, session)["url"], presign(api, session, method="PUT")["url"]

    problem(stranger.put(get, content=b"evil"), 403, "signed_url_invalid")
    problem(stranger.post(get), 403, "signed_url_invalid")
    problem(stranger.get(put), 403, "signed_url_invalid")
    assert stranger.head(put).status_code == 403
    problem(stranger.delete(get), 405, "method_not_allowed")
    assert stranger.get(get).content == b"kept"


def test_a_link_cannot_be_forged_or_changed(
    api: Api, session: str, stranger: httpx.Client, server: Server
) -> None:
    api.put(session, "a", b"a")
    api.put(session, "b", b"secret")
    url = presign(api, session)["url"]
    base, _, token = url.rpartition("/")
    body, _, signature = token.partition(".")
    fields = json.loads(base64.urlsafe_b64decode(body + "=="))
    forged = []
    for place, value in ((0, "PUT"), (1, "sess_other"), (2, "b"), (3, fields[3] + 999), (4, "x")):
        changed = [*fields]
        changed[place] = value
        text = base64.urlsafe_b64encode(json.dumps(changed, separators=(",", ":")).encode())
        forged.append(f"{text.decode().rstrip('=')}.{signature}")
    forged += [body, f"{body}.", f".{signature}", "x", "a.b", f"{body}.{signature}x", f"{token}.x",
               f"{body}=.{signature}", f"{body}.{signature[:-1]}", "%FF.%FF", "x" * 60_000,
               server.key, f"{body}.{server.key}"]  # fmt: skip
    for token in forged:
        response = stranger.get(f"{base}/{token}")
        problem(response, 403, "signed_url_invalid")
    # Everything after it belongs to the token, or is another route.
    for more in ("/../b", "/b", "%2F..%2Fb", "%00", "%0A", "/", "%252F"):
        refused = stranger.get(url + more, headers={"Host": "evil.example"})
        assert refused.status_code in (401, 403, 404)
        assert "location" not in refused.headers
    assert stranger.get(url).content == b"a"


def test_a_link_expires_with_the_key_that_created_it(
    api: Api, session: str, stranger: httpx.Client, server: Server
) -> None:
    directory = ("--data-dir", str(server.data_dir))
    key = json.loads(server.atoll("key", "create", "leaked", "--json", *directory).stdout)
    ran = api.run(session, "open('a', 'w').write('x')")
    with server.client() as http:
        http.headers["Authorization"] = f"Bearer {key['key']}"
        leaked = Api(http)
        # Another process made it, and removes it: that counts within seconds.
        eventually(lambda: http.get(f"{V1}/sessions/{session}").status_code == 200)
        get, put = (presign(leaked, session, method=method)["url"] for method in ("GET", "PUT"))
        listed = answer(http.get(f"{V1}/executions/{ran['execution_id']}/artifacts"))["items"]
        gets = (get, listed[0]["download_url"])
    own = presign(api, session)["url"]
    assert [stranger.get(url).text for url in (*gets, own)] == ["x"] * 3
    server.atoll("key", "rm", key["id"], *directory)
    eventually(lambda: stranger.get(get).status_code == 403)
    for url in gets:
        problem(stranger.get(url), 403, "signed_url_revoked")
    problem(stranger.put(put, content=b"evil"), 403, "signed_url_revoked")
    assert stranger.get(own).text == "x"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("../../.bashrc", ".._.._.bashrc"),
        ("..\\x", ".._x"),
        ("..", "file"),
        ("x\r\nSet-Cookie: a=b", "x__Set-Cookie%3A%20a%3Db"),
        ('a"; filename="b', "a%22%3B%20filename%3D%22b"),
        ("\u202egpj.exe", "_gpj.exe"),
    ],
)
def test_a_download_is_named_by_a_file_name_and_never_by_a_path(
    api: Api, session: str, stranger: httpx.Client, given: str, name: str
) -> None:
    api.put(session, "a", b"a")
    headers = stranger.get(presign(api, session, filename=given)["url"]).headers
    assert headers["content-disposition"] == f"attachment; filename*=UTF-8''{name}"
    assert "set-cookie" not in headers


def test_an_upload_by_a_link_is_limited_by_the_disk_of_its_session(
    api: Api, stranger: httpx.Client
) -> None:
    small = str(api.create(disk="16Mi")["id"])
    url = presign(api, small, "up", method="PUT")["url"]
    large = stranger.put(url, content=(bytes(1_000_000) for _ in range(30)))
    problem(large, 507, "disk_full")
    assert api.names(small) == []
    answer(stranger.put(url, content=b"small"), 201)
    api.end(small)
    problem(stranger.put(url, content=b"late"), 409, "session_ended")


def test_a_link_is_not_an_api_key(
    api: Api, session: str, stranger: httpx.Client, server: Server
) -> None:
    api.put(session, "a", b"a")
    token = presign(api, session)["url"].rpartition("/")[2]
    headers = {"Authorization": f"Bearer {token}"}

    problem(
        stranger.get(f"{server.url}{V1}/sessions/{session}", headers=headers), 401, "key_unknown"
    )
    problem(stranger.get(f"{server.url}{V1}/sessions/{session}/files/a"), 401, "key_missing")


def test_responses_to_clients_without_a_key_are_not_stored(
    stranger: httpx.Client, server: Server
) -> None:
    headers = {"Idempotency-Key": "a-stranger-s"}
    for _ in range(2):
        refused = stranger.post(f"{server.url}{V1}/signed/x", headers=headers)
        problem(refused, 403, "signed_url_invalid")
        assert "idempotency-replayed" not in refused.headers


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"path": "../x"}, 400, "bad_path"),
        ({"path": "/"}, 400, "bad_path"),
        ({"path": ""}, 422, "invalid_request"),
        ({"path": "a", "expires_in": 0}, 422, "invalid_request"),
        ({"path": "a", "expires_in": 604_801}, 422, "invalid_request"),
        ({"path": "a", "method": "DELETE"}, 422, "invalid_request"),
    ],
)
def test_an_invalid_request_for_a_link_is_refused(
    api: Api, session: str, body: dict[str, Any], status: int, code: str
) -> None:
    problem(api.http.post(f"{V1}/sessions/{session}/files/presign", json=body), status, code)


def test_a_link_cannot_lead_out_of_the_workspace(
    api: Api, session: str, stranger: httpx.Client
) -> None:
    api.run(session, "import os\nos.symlink('/etc/passwd', 'out')")
    problem(stranger.get(presign(api, session, "out")["url"]), 400, "bad_path")
    problem(stranger.get(presign(api, session, "/etc/passwd")["url"]), 400, "bad_path")
    problem(stranger.get(presign(api, session, "nothing")["url"]), 404, "file_not_found")
    session_url = f"{V1}/sessions/sess_nobody/files/presign"
    problem(api.http.post(session_url, json={"path": "a"}), 404, "session_not_found")


# Artifacts


def test_artifacts_have_a_kind_and_a_link(api: Api, session: str, stranger: httpx.Client) -> None:
    ran = api.run(
        session,
        "import os\nos.makedirs('output')\nopen('output/a.csv', 'w').write('1')\n"
        "open('run.log', 'w').write('2')\nopen('plain', 'w').write('3')",
    )
    listed = answer(api.http.get(f"{V1}/executions/{ran['execution_id']}/artifacts"))["items"]

    assert [(item["path"], item["type"]) for item in listed] == [
        ("output/a.csv", "output"), ("plain", "artifact"), ("run.log", "log"),
    ]  # fmt: skip
    assert [stranger.get(item["download_url"]).text for item in listed] == ["1", "3", "2"]
    artifacts = api.execution(ran["execution_id"])["artifacts"]
    assert [item["path"] for item in artifacts] == [item["path"] for item in listed]
    assert all(item["download_url"] for item in artifacts)
    pages = answer(api.http.get(f"{V1}/sessions/{session}/executions"))["items"]
    assert pages[0]["artifacts"][0]["download_url"] is None


def test_artifacts_of_a_session_are_the_newest_of_each_path(api: Api, session: str) -> None:
    code = "for name in {!r}: open(name, 'w').write({!r})"
    api.run(session, code.format("abc", "1"))
    newer = api.run(session, code.format("bd", "22"))["execution_id"]
    found: list[dict[str, Any]] = []
    params: dict[str, Any] = {"limit": 2}
    while True:
        page = answer(api.http.get(f"{V1}/sessions/{session}/artifacts", params=params))
        found += page["items"]
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]

    assert [(item["path"], item["size"]) for item in found] == [
        ("a", 1), ("b", 2), ("c", 1), ("d", 2),
    ]  # fmt: skip
    assert [item["execution_id"] == newer for item in found] == [False, True, False, True]
    bad = {"cursor": "!"}
    problem(api.http.get(f"{V1}/sessions/{session}/artifacts", params=bad), 400, "bad_cursor")
    problem(api.http.get(f"{V1}/sessions/nobody/artifacts"), 404, "session_not_found")
