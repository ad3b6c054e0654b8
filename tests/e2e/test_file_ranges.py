"""Parts of files, conditional requests, and names that are no text."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from tests.e2e.api import V1, Api, answer, problem

if TYPE_CHECKING:
    import httpx

pytestmark = pytest.mark.quick


def url(session: str, path: str) -> str:
    return f"{V1}/sessions/{session}/files/{quote(path)}"


def get(api: Api, session: str, path: str = "a", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return api.http.get(url(session, path), headers=named)


@pytest.fixture
def ten(api: Api, session: str) -> str:
    """A session with a file `a` of ten bytes."""
    api.put(session, "a", b"0123456789")
    return session


@pytest.mark.parametrize(
    ("asked", "content", "told"),
    [
        ("bytes=0-3", b"0123", "bytes 0-3/10"),
        ("bytes=7-", b"789", "bytes 7-9/10"),
        ("bytes=-2", b"89", "bytes 8-9/10"),
        ("bytes=8-1000", b"89", "bytes 8-9/10"),
        ("bytes=-1000", b"0123456789", "bytes 0-9/10"),
        ("BYTES=1-1", b"1", "bytes 1-1/10"),
    ],
)
def test_a_range_of_a_file(api: Api, ten: str, asked: str, content: bytes, told: str) -> None:
    response = get(api, ten, Range=asked)

    assert (response.status_code, response.content) == (206, content)
    assert response.headers["content-range"] == told
    assert response.headers["content-length"] == str(len(content))
    assert response.headers["accept-ranges"] == "bytes"


@pytest.mark.parametrize("asked", ["bytes=10-", "bytes=10-20", "bytes=-0", f"bytes={'9' * 40}-"])
def test_a_range_beyond_the_end_is_refused(api: Api, ten: str, asked: str) -> None:
    response = get(api, ten, Range=asked)

    problem(response, 416, "range_not_satisfiable")
    assert response.headers["content-range"] == "bytes */10"


@pytest.mark.parametrize("asked", ["bytes=0-1,3-4", "lines=0-1", "bytes=5-2", "bytes=x", "bytes=-"])
def test_an_invalid_range_is_ignored(api: Api, ten: str, asked: str) -> None:
    response = get(api, ten, Range=asked)

    assert (response.status_code, response.content) == (200, b"0123456789")


def test_a_file_that_the_client_has_is_not_sent_again(api: Api, ten: str) -> None:
    first = get(api, ten)
    tag, date = first.headers["etag"], first.headers["last-modified"]
    for headers in ({"If-None-Match": tag}, {"If-None-Match": f'"x", W/{tag}'},
                    {"If-None-Match": "*"}, {"If-Modified-Since": date}):  # fmt: skip
        response = get(api, ten, **headers)
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == tag
    for headers in ({"If-None-Match": '"x"'}, {"If-Match": tag},
                    {"If-Modified-Since": "Thu, 01 Jan 1970 00:00:00 GMT"},
                    {"If-None-Match": '"x"', "If-Modified-Since": date},
                    {"If-Unmodified-Since": date}, {"If-Modified-Since": "yesterday"}):  # fmt: skip
        assert get(api, ten, **headers).status_code == 200
    problem(get(api, ten, If_Match='"x"'), 412, "precondition_failed")
    problem(get(api, ten, If_Match=f"W/{tag}"), 412, "precondition_failed")
    old = "Thu, 01 Jan 1970 00:00:00 GMT"
    problem(get(api, ten, If_Unmodified_Since=old), 412, "precondition_failed")
    problem(get(api, ten, If_None_Match="no quotes"), 400, "bad_condition")
    assert answer(api.http.get(url(ten, "a"), params={"metadata": True}))["etag"] == tag


def test_a_changed_file_has_a_new_tag(api: Api, ten: str) -> None:
    tag = get(api, ten).headers["etag"]
    api.run(ten, "import os\ns = os.stat('a')\nopen('a', 'w').write('9876543210')\n"
            "os.utime('a', ns=(s.st_atime_ns, s.st_mtime_ns))")  # fmt: skip

    assert get(api, ten, If_None_Match=tag).content == b"9876543210"
    resumed = get(api, ten, Range="bytes=5-", If_Range=tag)
    assert (resumed.status_code, resumed.content) == (200, b"9876543210")


def test_a_download_is_resumed_if_it_is_the_same_file(api: Api, ten: str) -> None:
    first = get(api, ten)
    for version in (first.headers["etag"], first.headers["last-modified"]):
        response = get(api, ten, Range="bytes=5-", If_Range=version)
        assert (response.status_code, response.content) == (206, b"56789")
    response = get(api, ten, Range="bytes=5-", If_Range="Thu, 01 Jan 1970 00:00:00 GMT")
    assert (response.status_code, response.content) == (200, b"0123456789")


def test_head_sends_headers_without_content(api: Api, ten: str) -> None:
    response = api.http.head(url(ten, "a"))

    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-length"] == "10"
    assert response.headers["etag"] == get(api, ten).headers["etag"]
    part = api.http.head(url(ten, "a"), headers={"Range": "bytes=2-4"})
    assert (part.status_code, part.headers["content-length"]) == (206, "3")
    assert api.http.head(url(ten, "nothing")).status_code == 404


def test_a_conditional_upload_checks_the_current_file(api: Api, session: str) -> None:
    new = {"If-None-Match": "*"}
    made = api.http.put(url(session, "a"), content=b"1", headers=new)
    assert made.status_code == 201
    problem(api.http.put(url(session, "a"), content=b"2", headers=new), 412, "precondition_failed")
    tag = made.headers["etag"]
    assert answer(made, 201)["etag"] == tag
    over = {"If-Match": tag}
    assert api.http.put(url(session, "a"), content=b"3", headers=over).status_code == 201
    problem(api.http.put(url(session, "a"), content=b"4", headers=over), 412, "precondition_failed")
    problem(
        api.http.put(url(session, "b"), content=b"4", headers={"If-Match": "*"}),
        412,
        "precondition_failed",
    )
    assert get(api, session).content == b"3"


def test_an_upload_can_set_the_mode(api: Api, session: str) -> None:
    put = api.http.put(url(session, "run"), content=b"#!/bin/sh\necho yes", params={"mode": "755"})
    assert answer(put, 201)["mode"] == "0755"
    assert api.run(session, language="shell", code="./run")["stdout"] == "yes\n"
    files = f"{V1}/sessions/{session}/files"
    changed = api.http.post(f"{files}/chmod", json={"path": "run", "mode": "0600"})
    assert answer(changed)["mode"] == "0600"
    for mode in ("0999", "4755", "", "rwx"):
        body = {"path": "run", "mode": mode}
        problem(api.http.post(f"{files}/chmod", json=body), 422, "invalid_request")


def test_names_that_are_not_utf8_can_be_used(api: Api, session: str) -> None:
    files = f"{V1}/sessions/{session}/files"
    made = api.run(session, "import os\nos.mkdir(b'd\\xff')\nopen(b'd\\xff/\\xfe', 'w').write('x')")
    assert made["artifacts"] == ["d\ufffd/\ufffd"]
    (directory,) = answer(api.http.get(files))["items"]
    assert (directory["path"], directory["encoded_path"]) == ("d\ufffd", "d%FF")
    listed = answer(api.http.get(f"{files}?path=d%FF"))
    (item,) = listed["items"]
    assert (item["name"], item["encoded_path"]) == ("\ufffd", "d%FF/%FE")
    (found,) = answer(api.http.get(f"{files}?recursive=true&glob=*/*"))["items"]
    assert found == item
    assert api.http.get(f"{files}/d%FF/%FE").content == b"x"
    assert answer(api.http.get(f"{files}/d%FF/%FE?metadata=true")) == item
    assert answer(api.http.put(f"{files}/d%FF/%FD", content=b"y"), 201)["encoded_path"] == (
        "d%FF/%FD"
    )
    body = {"source": {"encoded": "d%FF/%FD"}, "target": {"encoded": "d%FF/%FC"}}
    assert answer(api.http.post(f"{files}/move", json=body))["encoded_path"] == "d%FF/%FC"
    copied = api.http.post(f"{files}/copy", json={**body, "source": {"encoded": "d%FF/%FC"},
                                                   "target": "text"})  # fmt: skip
    assert answer(copied, 201)["path"] == "text"
    match = answer(api.http.get(f"{files}/search", params={"query": "x"}))["items"][0]
    assert match["encoded_path"] == "d%FF/%FE"
    seen = api.run(session, "import os\nprint(sorted(os.listdir(b'd\\xff')))")["stdout"]
    assert seen == "[b'\\xfc', b'\\xfe']\n"
    artifact = api.execution(made["execution_id"])["artifacts"][0]
    assert artifact["encoded_path"] == "d%FF/%FE"
    assert api.http.get(artifact["download_url"], headers={"Authorization": ""}).content == b"x"
    assert api.http.delete(f"{files}/d%FF/%FE").status_code == 204
    assert api.http.delete(f"{files}/d%FF?recursive=true").status_code == 204
    assert api.names(session) == ["text"]
