"""A session's files over HTTP: in, out, listed, moved, removed; whole or not at all."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from tests.harness import Server

pytestmark = pytest.mark.quick

MiB = 1024 * 1024

NAMES = {
    "plain": "file.txt",
    "spaces": " two words ",
    "unicode": "naïve-日本語-🙂",
    "percent": "100%25 %2e%2E",
    "quotes": 'it\'s "quoted"',
    "newline": "line\nbreak",
    "newline at the end": "end\n",
    "backslash": "back\\slash",
    "query": "what?a=b&c#d;e",
    "dots": "...",
    "dash": "-rf",
    "hidden": ".hidden",
    "long": "x" * 255,
    "upload": "upload",
    "mkdir": "mkdir",
}


def url(session: str, path: str = "") -> str:
    return f"{V1}/sessions/{session}/files" + (f"/{quote(path)}" if path else "")


def download(api: Api, session: str, path: str) -> bytes:
    response = api.http.get(url(session, path))
    assert response.status_code == 200, response.text
    return response.content


# In and out


@pytest.mark.slow
@pytest.mark.every_driver
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_a_name_may_contain_any_character(api: Api, session: str, name: str) -> None:
    content = name.encode()
    put = answer(api.http.put(url(session, name), content=content), 201)

    assert (put["path"], put["name"], put["type"], put["size"]) == (
        name, name, "file", len(content),
    )  # fmt: skip
    assert api.names(session) == [name]
    assert download(api, session, name) == content
    assert answer(api.http.get(url(session, name), params={"metadata": "true"})) == put
    seen = api.run(session, "import os, json\nprint(json.dumps(os.listdir()))")["stdout"]
    assert sorted(json.loads(seen)) == sorted([".tmp", name])
    assert api.http.delete(url(session, name)).status_code == 204
    assert api.names(session) == []


def test_a_name_does_not_match_one_that_differs_by_a_newline(api: Api, session: str) -> None:
    api.put(session, "a", b"keep")

    problem(api.http.get(url(session, "a\n")), 404, "file_not_found")
    problem(api.http.delete(url(session, "a\n")), 404, "file_not_found")
    assert download(api, session, "a") == b"keep"


def test_an_upload_creates_parent_directories(api: Api, session: str) -> None:
    put = answer(api.http.put(url(session, "a/b/c.txt"), content=b"deep"), 201)

    assert put["path"] == "a/b/c.txt"
    assert put["mode"] == "0644"
    assert api.run(session, "print(open('a/b/c.txt').read())")["stdout"] == "deep\n"


def test_a_path_may_start_with_the_workspace(api: Api, session: str) -> None:
    api.put(session, "a", b"x")

    assert download(api, session, "/workspace/a") == b"x"


def test_code_can_change_and_move_uploaded_files(api: Api, session: str) -> None:
    api.put(session, "dir/file", b"x")
    code = "import os\nopen('dir/file', 'a').write('y')\nos.rename('dir/file', 'dir/new')"

    assert api.run(session, code)["status"] == "success"
    assert download(api, session, "dir/new") == b"xy"


@pytest.mark.every_driver
def test_an_upload_replaces_the_file(api: Api, session: str) -> None:
    api.put(session, "a", b"a long first version")
    api.put(session, "a", b"short")

    assert download(api, session, "a") == b"short"


def test_an_empty_file_can_be_uploaded_and_downloaded(api: Api, session: str) -> None:
    assert api.put(session, "empty")["size"] == 0
    assert download(api, session, "empty") == b""


def test_a_raw_upload_is_written_to_its_path(api: Api, session: str) -> None:
    response = api.http.post(
        f"{url(session)}/upload", params={"path": "in/data.bin"}, content=b"\0\xff"
    )

    assert [item["path"] for item in answer(response, 201)["items"]] == ["in/data.bin"]
    assert download(api, session, "in/data.bin") == b"\0\xff"
    refused = problem(api.http.post(f"{url(session)}/upload", content=b"x"), 422, "invalid_request")
    assert refused["field"] == "path"


def test_a_form_uploads_several_files(api: Api, session: str) -> None:
    files = [("file", ("a.txt", b"first")), ("file", ("ü b.bin", bytes(range(256))))]
    response = api.http.post(f"{url(session)}/upload", files=files)

    assert [(item["path"], item["size"]) for item in answer(response, 201)["items"]] == [
        ("a.txt", 5),
        ("ü b.bin", 256),
    ]
    assert download(api, session, "ü b.bin") == bytes(range(256))


@pytest.mark.parametrize("where", ["field", "query"])
def test_a_form_uploads_into_a_directory(api: Api, session: str, where: str) -> None:
    files = [("file", ("a.txt", b"first")), ("other", ("b.txt", b"second"))]
    data, params = ({"path": "in/here"}, {}) if where == "field" else ({}, {"path": "in/here"})
    response = api.http.post(f"{url(session)}/upload", files=files, data=data, params=params)

    assert [item["path"] for item in answer(response, 201)["items"]] == [
        "in/here/a.txt",
        "in/here/b.txt",
    ]


def form(*parts: tuple[str, bytes]) -> dict[str, Any]:
    body = b"".join(
        b"--b\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + data + b"\r\n"
        for head, data in parts
    )
    return {
        "content": body + b"--b--\r\n",
        "headers": {"Content-Type": "multipart/form-data; boundary=b"},
    }


@pytest.mark.parametrize(
    "filename", ["..", ".", "", "/", "x" * 300], ids=["..", ".", "empty", "slash", "too long"]
)
def test_a_form_with_a_bad_file_name_is_refused(api: Api, session: str, filename: str) -> None:
    answer(api.http.post(f"{url(session)}/mkdir", json={"path": "dir"}), 201)
    for path in (b"dir", b""):
        sent = form(('name="path"', path), (f'name="file"; filename="{filename}"', b"x"))
        problem(api.http.post(f"{url(session)}/upload", **sent), 400, "bad_path")

    assert api.names(session) == ["dir"]
    assert api.names(session, "dir") == []


def test_the_file_name_of_a_form_cannot_lead_elsewhere(api: Api, session: str) -> None:
    sent = form(('name="file"; filename="../../etc/evil"', b"x"))

    assert answer(api.http.post(f"{url(session)}/upload", **sent), 201)["items"][0]["path"] == (
        "evil"
    )


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (form(('name="path"', b"x")), "no_file"),
        (form(), "no_file"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, "bad_multipart"),
        ({**form(), "content": b"nonsense"}, "bad_multipart"),
        ({**form(), "content": b"--b\r\nContent-Disposition: form-data; filename=a\r\n\r\nx"},
         "bad_multipart"),
        (form(('name="path"', b"x" * 100_000)), "bad_multipart"),
    ],
    ids=["no file", "nothing", "no boundary", "nonsense", "cut", "long field"],
)  # fmt: skip
def test_a_malformed_form_is_refused(
    api: Api, session: str, sent: dict[str, Any], code: str
) -> None:
    problem(api.http.post(f"{url(session)}/upload", **sent), 422, code)
    assert api.names(session) == []


def test_a_download_cannot_become_a_page_of_this_origin(api: Api, session: str) -> None:
    api.put(session, "dir/pägé.html", b"<script>alert(1)</script>")
    response = api.http.get(url(session, "dir/pägé.html"))

    assert response.headers["content-type"].startswith("text/html")
    assert response.headers["content-disposition"] == (
        "attachment; filename*=UTF-8''p%C3%A4g%C3%A9.html"
    )
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-security-policy"] == "sandbox; default-src 'none'"
    assert response.headers["content-length"] == "25"


def test_a_link_is_followed_only_inside_the_workspace(api: Api, session: str) -> None:
    code = "import os\nopen('a', 'w').write('in')\nos.symlink('a', 'b')\n"
    api.run(session, code + "os.symlink('/etc/passwd', 'out')\nos.symlink('/etc', 'etc')")

    assert download(api, session, "b") == b"in"
    problem(api.http.get(url(session, "out")), 400, "bad_path")
    problem(api.http.get(url(session, "etc/passwd")), 400, "bad_path")
    problem(api.http.put(url(session, "etc/evil"), content=b"x"), 400, "bad_path")
    assert answer(api.http.get(url(session, "out"), params={"metadata": "true"}))["type"] == (
        "symlink"
    )


@pytest.mark.parametrize(
    "path",
    ["..", "../x", "a/../../x", "/etc/passwd", "a/\0b", "x" * 256],
    ids=["dots", "above", "above by a detour", "absolute", "nul", "too long"],
)
def test_a_path_out_of_the_workspace_is_refused(api: Api, session: str, path: str) -> None:
    # Percent-encoded completely, so that no client normalises it.
    full = f"{url(session)}/" + "".join(f"%{byte:02X}" for byte in path.encode())

    problem(api.http.get(full), 400, "bad_path")
    problem(api.http.put(full, content=b"x"), 400, "bad_path")
    problem(api.http.delete(full), 400, "bad_path")
    problem(api.http.get(url(session), params={"path": path}), 400, "bad_path")
    response = api.http.post(f"{url(session)}/upload", params={"path": path}, content=b"x")
    problem(response, 400, "bad_path")
    if "\0" not in path:
        api.put(session, "b", b"x")
        for body in ({"source": path, "target": "free"}, {"source": "b", "target": path}):
            problem(api.http.post(f"{url(session)}/move", json=body), 400, "bad_path")
        problem(api.http.post(f"{url(session)}/mkdir", json={"path": path}), 400, "bad_path")


def test_the_workspace_itself_is_not_a_file(api: Api, session: str) -> None:
    base = f"{url(session)}/"

    assert api.http.get(base).status_code in (400, 409)
    assert api.http.put(base, content=b"x").status_code == 400
    assert api.http.delete(base, params={"recursive": "true"}).status_code == 400


# Listing


def test_a_directory_is_listed_by_name_page_by_page(api: Api, session: str) -> None:
    api.run(session, "for n in range(25): open(f'{n:02}', 'w').close()")
    found: list[str] = []
    params: dict[str, Any] = {"limit": 10}
    pages = 0
    while True:
        page = answer(api.http.get(url(session), params=params))
        found += [item["name"] for item in page["items"]]
        pages += 1
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]

    assert found == [f"{n:02}" for n in range(25)]
    assert pages == 3


def test_a_listing_reports_kinds_and_sizes(api: Api, session: str) -> None:
    code = (
        "import os\nos.makedirs('dir/sub')\nopen('dir/file', 'w').write('12345')\n"
        "os.symlink('file', 'dir/link')\nos.mkfifo('dir/pipe')\nos.chmod('dir/file', 0o600)\n"
    )
    api.run(session, code)
    page = answer(api.http.get(url(session), params={"path": "dir"}))

    assert [(item["path"], item["type"]) for item in page["items"]] == [
        ("dir/file", "file"),
        ("dir/link", "symlink"),
        ("dir/pipe", "other"),
        ("dir/sub", "directory"),
    ]
    assert page["items"][0]["size"] == 5
    assert page["items"][0]["mode"] == "0600"


def test_a_listing_that_fails_reports_the_reason(api: Api, session: str) -> None:
    api.put(session, "file", b"x")

    problem(api.http.get(url(session), params={"path": "nowhere"}), 404, "file_not_found")
    problem(api.http.get(url(session), params={"path": "file"}), 409, "not_directory")
    problem(api.http.get(url(session), params={"limit": 1001}), 422, "invalid_request")


# Stat, mkdir, move, delete


def test_missing_files_are_not_found(api: Api, session: str) -> None:
    problem(api.http.get(url(session, "no")), 404, "file_not_found")
    problem(api.http.get(url(session, "no"), params={"metadata": "true"}), 404, "file_not_found")
    problem(api.http.delete(url(session, "no")), 404, "file_not_found")
    body = {"source": "no", "target": "b"}
    problem(api.http.post(f"{url(session)}/move", json=body), 404, "file_not_found")


def test_a_directory_is_not_a_file(api: Api, session: str) -> None:
    answer(api.http.post(f"{url(session)}/mkdir", json={"path": "dir"}), 201)

    problem(api.http.get(url(session, "dir")), 409, "is_directory")
    problem(api.http.put(url(session, "dir"), content=b"x"), 409, "is_directory")
    stat = answer(api.http.get(url(session, "dir"), params={"metadata": "true"}))
    assert stat["type"] == "directory"


@pytest.mark.every_driver
def test_a_pipe_is_not_read(api: Api, session: str) -> None:
    api.run(session, "import os\nos.mkfifo('pipe')")

    problem(api.http.get(url(session, "pipe")), 409, "not_a_file")


def test_directories_are_created_with_or_without_parents(api: Api, session: str) -> None:
    mkdir = f"{url(session)}/mkdir"

    assert answer(api.http.post(mkdir, json={"path": "a/b"}), 201)["path"] == "a/b"
    assert answer(api.http.post(mkdir, json={"path": "a/b"}), 201)["type"] == "directory"
    problem(api.http.post(mkdir, json={"path": "x/y", "parents": False}), 404, "file_not_found")
    problem(api.http.post(mkdir, json={"path": "a", "parents": False}), 409, "file_exists")
    api.put(session, "file", b"x")
    problem(api.http.post(mkdir, json={"path": "file"}), 409, "file_exists")
    problem(api.http.post(mkdir, json={"path": "file/x"}), 409, "not_directory")
    problem(api.http.post(mkdir, json={"path": ""}), 422, "invalid_request")


def test_moving_a_file_overwrites_only_on_request(api: Api, session: str) -> None:
    move = f"{url(session)}/move"
    api.put(session, "a", b"a")
    api.put(session, "b", b"b")

    problem(api.http.post(move, json={"source": "a", "target": "b"}), 409, "file_exists")
    assert download(api, session, "b") == b"b"
    body = {"source": "a", "target": "b", "overwrite": True}
    assert answer(api.http.post(move, json=body))["path"] == "b"
    assert download(api, session, "b") == b"a"
    assert answer(api.http.post(move, json={"source": "b", "target": "new/dir/c"}))["size"] == 1
    assert api.names(session) == ["new"]


def test_a_directory_can_be_moved_but_not_into_itself(api: Api, session: str) -> None:
    move = f"{url(session)}/move"
    api.put(session, "dir/file", b"x")

    assert answer(api.http.post(move, json={"source": "dir", "target": "moved"}))["type"] == (
        "directory"
    )
    assert download(api, session, "moved/file") == b"x"
    body = {"source": "moved", "target": "moved/inside"}
    problem(api.http.post(move, json=body), 400, "bad_path")


def test_a_directory_with_content_is_removed_only_on_request(api: Api, session: str) -> None:
    api.put(session, "dir/sub/file", b"x")

    problem(api.http.delete(url(session, "dir")), 409, "not_empty")
    response = api.http.delete(url(session, "dir"), params={"recursive": "true"})
    assert response.status_code == 204
    assert api.names(session) == []


def test_removing_a_link_to_a_directory_keeps_the_directory(api: Api, session: str) -> None:
    api.run(session, "import os\nos.mkdir('d')\nopen('d/f', 'w').close()\nos.symlink('d', 'l')")
    response = api.http.delete(url(session, "l"), params={"recursive": "true"})

    assert response.status_code == 204
    assert api.names(session, "d") == ["f"]


# Big, broken off, full


def resident(server: Server) -> int:
    assert server.process is not None
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_a_large_file_is_uploaded_and_downloaded_without_using_memory(
    api: Api, session: str, server: Server
) -> None:
    block = bytes(range(256)) * (MiB // 256)
    before = resident(server)
    most = before

    def blocks() -> Iterator[bytes]:
        nonlocal most
        for _ in range(64):
            yield block
            most = max(most, resident(server))

    put = answer(api.http.put(url(session, "big"), content=blocks()), 201)
    assert put["size"] == 64 * MiB
    digest = hashlib.sha256()
    with api.http.stream("GET", url(session, "big")) as response:
        assert response.headers["content-length"] == str(64 * MiB)
        for piece in response.iter_bytes():
            digest.update(piece)
            most = max(most, resident(server))

    wanted = hashlib.sha256()
    for _ in range(64):
        wanted.update(block)
    assert digest.hexdigest() == wanted.hexdigest()
    assert most - before < 32 * MiB


@pytest.mark.slow
def test_an_unread_download_is_paused_and_closed(api: Api, session: str, server: Server) -> None:
    api.run(session, "open('big', 'wb').truncate(200 << 20)")
    before = resident(server)
    with api.http.stream("GET", url(session, "big")) as response:
        first = next(response.iter_bytes())
        assert first
        assert api_still_answers(server, session)
        assert resident(server) - before < 32 * MiB

    assert download(api, session, "big")[:10] == b"\0" * 10


def api_still_answers(server: Server, session: str) -> bool:
    with server.client() as other:
        return bool(Api(other).run(session, "print(1)")["stdout"] == "1\n")


@pytest.mark.every_driver
@pytest.mark.parametrize("chunked", [False, True], ids=["by length", "chunked"])
def test_an_aborted_upload_leaves_nothing(
    api: Api, session: str, server: Server, chunked: bool
) -> None:
    def names() -> str:
        """As seen by code inside: the API does not list unfinished uploads."""
        return str(api.run(session, "import os\nprint(sorted(os.listdir()))")["stdout"])

    api.put(session, "file", b"as it was")
    parts = urlsplit(server.url)
    assert parts.hostname
    assert parts.port
    with socket.create_connection((parts.hostname, parts.port)) as line:
        head = (
            f"PUT {url(session, 'file')} HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {server.key}\r\n"
        )
        length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 1000000"
        line.sendall(f"{head}{length}\r\n\r\n".encode())
        line.sendall(b"1000\r\n" + b"x" * 0x1000 + b"\r\n" if chunked else b"x" * 4096)
        # Begun: it is on its way into the workspace.
        eventually(lambda: ".atoll-upload-" in names())
        assert api.names(session) == ["file"]

    eventually(lambda: names() == "['.tmp', 'file']\n")
    assert download(api, session, "file") == b"as it was"


def test_a_file_that_does_not_fit_is_refused_and_leaves_nothing(api: Api) -> None:
    session = api.create(disk="16Mi")["id"]
    response = put_in_blocks(api, session, "big", 40)

    problem(response, 507, "disk_full")
    assert "big" not in api.names(session)
    assert api.put(session, "small", b"x")["size"] == 1
    api.end(session)


def put_in_blocks(api: Api, session: str, path: str, count: int) -> httpx.Response:
    block = b"x" * MiB
    return api.http.put(url(session, path), content=(block for _ in range(count)))


def test_a_file_whose_name_is_not_utf8_is_listed(api: Api, session: str) -> None:
    api.run(session, "open(b'\\xff\\xfe', 'w').close()")
    page = answer(api.http.get(url(session)))

    assert len(page["items"]) == 1


def test_an_unknown_session_has_no_files(api: Api, server: Server) -> None:
    problem(api.http.get(url("sess_nobody")), 404, "session_not_found")
    problem(api.http.put(url("sess_nobody", "x"), content=b"x"), 404, "session_not_found")
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
    connection.request(
        "POST",
        f"{url('sess_nobody')}/upload",
        headers={"Authorization": f"Bearer {server.key}", **form()["headers"]},
        body=form(('name="f"; filename="f"', b"x"))["content"],
    )
    assert connection.getresponse().status == 404
    connection.close()
