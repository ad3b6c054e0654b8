"""Trees over HTTP: listed, searched, packed, unpacked, copied, watched."""

from __future__ import annotations

import base64
import io
import tarfile
import threading
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.api import V1, Api, answer, problem, read_events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness import Server

pytestmark = pytest.mark.quick


def files(session: str) -> str:
    return f"{V1}/sessions/{session}/files"


@pytest.fixture
def project(api: Api, session: str) -> str:
    """A session with a small project in it."""
    for path, content in (
        ("src/main.py", b"import os\nprint('hello')\n"),
        ("src/lib/util.py", b"def hello():\n    pass\n"),
        ("README.md", b"Say hello.\n"),
        ("data/blob.bin", b"hello\0\1\2"),
    ):
        api.put(session, path, content)
    return session


def test_a_tree_is_listed_by_pattern_over_pages(api: Api, project: str) -> None:
    def paths(**params: Any) -> list[str]:
        found: list[str] = []
        while True:
            page = answer(api.http.get(files(project), params={"limit": 2, **params}))
            found += [item["path"] for item in page["items"]]
            if page["next_cursor"] is None:
                return found
            params["cursor"] = page["next_cursor"]

    assert paths(glob="**/*.py") == ["src/lib/util.py", "src/main.py"]
    assert paths(recursive=True) == [
        "README.md", "data", "data/blob.bin", "src", "src/lib", "src/lib/util.py", "src/main.py",
    ]  # fmt: skip
    assert paths(recursive=True, path="src") == ["src/lib", "src/lib/util.py", "src/main.py"]
    assert paths(path="src", glob="*.py") == ["src/main.py"]
    bad: tuple[dict[str, Any], ...] = ({"cursor": "nonsense"}, {"cursor": "dA"})
    for params in bad:
        problem(api.http.get(files(project), params=params), 400, "bad_cursor")
    problem(api.http.get(files(project), params={"glob": "../*"}), 422, "bad_glob")
    missing = api.http.get(files(project), params={"path": "no", "recursive": True})
    problem(missing, 404, "file_not_found")


def test_content_is_searched(api: Api, project: str) -> None:
    def found(**params: Any) -> list[tuple[str, int, int]]:
        page = answer(api.http.get(f"{files(project)}/search", params=params))
        return [(item["path"], item["line"], item["column"]) for item in page["items"]]

    assert found(query="hello") == [
        ("README.md", 1, 5), ("src/lib/util.py", 1, 5), ("src/main.py", 2, 8),
    ]  # fmt: skip
    assert found(query="hello", glob="**/*.py", path="src") == [
        ("src/lib/util.py", 1, 5), ("src/main.py", 2, 8),
    ]  # fmt: skip
    assert found(query=r"^def \w+\(", regex=True) == [("src/lib/util.py", 1, 1)]
    assert found(query="SAY", ignore_case=True) == [("README.md", 1, 1)]
    search = f"{files(project)}/search"
    first = answer(api.http.get(search, params={"query": "hello", "limit": 1}))
    again = {"query": "hello", "limit": 5, "cursor": first["next_cursor"]}
    assert len(answer(api.http.get(search, params=again))["items"]) == 2
    problem(api.http.get(search, params={"query": "(", "regex": True}), 422, "bad_query")
    deep = base64.urlsafe_b64encode(b"s" + b"[" * 20_000).decode()
    for cursor in ("bad", deep):
        problem(api.http.get(search, params={"query": "x", "cursor": cursor}), 400, "bad_cursor")


def test_files_can_be_named_search_and_watch(api: Api, session: str) -> None:
    for name in ("search", "watch", "copy", "presign", "chmod"):
        api.put(session, name, name.encode())
        assert api.http.get(f"{files(session)}/{name}").content == name.encode()
        assert api.http.delete(f"{files(session)}/{name}").status_code == 204


@pytest.mark.parametrize("form", ["tar", "tar.gz", "zip"])
def test_a_directory_is_packed_and_unpacked(api: Api, project: str, form: str) -> None:
    response = api.http.get(f"{files(project)}/src", params={"archive": form})
    assert response.status_code == 200
    assert response.headers["content-disposition"] == f"attachment; filename*=UTF-8''src.{form}"
    assert response.headers["x-content-type-options"] == "nosniff"
    if form == "zip":
        names = zipfile.ZipFile(io.BytesIO(response.content)).namelist()
    else:
        with tarfile.open(fileobj=io.BytesIO(response.content)) as archive:
            names = archive.getnames()
    assert sorted(name.rstrip("/") for name in names) == ["lib", "lib/util.py", "main.py"]
    put = api.http.put(
        f"{files(project)}/again/src", params={"archive": form}, content=response.content
    )
    assert answer(put) == {"path": "again/src", "entries": 3}
    ran = api.run(project, language="shell", code="diff -r src again/src && echo same")
    assert ran["stdout"] == "same\n"
    problem(api.http.get(f"{files(project)}/no", params={"archive": form}), 404, "file_not_found")
    whole = api.http.get(f"{files(project)}/", params={"archive": form})
    assert whole.headers["content-disposition"].endswith(f"workspace.{form}")
    put = api.http.put(f"{files(project)}/x", params={"archive": form}, content=b"x" * 1000)
    problem(put, 422, "bad_archive")


@pytest.mark.slow
def test_a_tree_that_does_not_fit_leaves_nothing(api: Api) -> None:
    session = api.create(disk="16Mi")["id"]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for number in range(40):
            info = tarfile.TarInfo(f"f{number}")
            info.size = 1 << 20
            archive.addfile(info, io.BytesIO(bytes(1 << 20)))
    put = api.http.put(f"{files(session)}/d", params={"archive": "tar"}, content=out.getvalue())

    problem(put, 507, "disk_full")
    seen = api.run(session, "import os\nprint(sorted(os.listdir()))")["stdout"]
    assert seen == "['.tmp']\n"
    api.end(session)


def test_a_tree_is_copied(api: Api, project: str) -> None:
    copy = f"{files(project)}/copy"
    assert answer(api.http.post(copy, json={"source": "src", "target": "b/src"}), 201)["type"] == (
        "directory"
    )
    assert api.names(project, "b/src/lib") == ["util.py"]
    body: dict[str, Any] = {"source": "src", "target": "b/src"}
    problem(api.http.post(copy, json=body), 409, "file_exists")
    problem(api.http.post(copy, json={**body, "overwrite": True}), 409, "not_empty")
    body = {"source": "README.md", "target": "src/main.py", "overwrite": True}
    assert answer(api.http.post(copy, json=body), 201)["size"] == 11
    problem(api.http.post(copy, json={"source": "no", "target": "x"}), 404, "file_not_found")


class Watch:
    """A client that watches, in its own thread."""

    def __init__(self, server: Server, session: str, **params: Any) -> None:
        self._http = server.client()
        self._events: Iterator[Any] = iter(())
        self._response = self._http.stream("GET", f"{files(session)}/watch", params=params)
        self._heard = read_events(self._response.__enter__())

    def next(self) -> tuple[str, dict[str, Any]]:
        _, name, content = next(self._heard)
        return name, content

    def until(self, name: str, path: str) -> dict[str, Any]:
        while True:
            found, content = self.next()
            if (found, content.get("path")) == (name, path):
                return content

    def close(self) -> None:
        self._response.__exit__(None, None, None)
        self._http.close()


def test_changes_in_a_workspace_are_reported(api: Api, project: str, server: Server) -> None:
    watch = Watch(server, project, path="")
    try:
        assert watch.next() == ("watching", {})
        api.put(project, "new/file", b"x")
        watch.until("created", "new/file")
        api.run(project, "open('new/file', 'a').write('y')")
        watch.until("modified", "new/file")
        body = {"source": "new/file", "target": "src/moved"}
        answer(api.http.post(f"{files(project)}/move", json=body))
        assert watch.until("moved", "src/moved")["from"] == "new/file"
        api.http.delete(f"{files(project)}/src", params={"recursive": True})
        watch.until("deleted", "src")
    finally:
        watch.close()


def test_a_watch_ends_with_its_session(api: Api, server: Server) -> None:
    session = api.create()["id"]
    watch = Watch(server, session, path="")
    try:
        assert watch.next()[0] == "watching"
        ended = threading.Thread(target=api.end, args=(session,))
        ended.start()
        name = ""
        while name != "end":
            name, content = watch.next()
        ended.join()
        assert content["code"] in ("link_lost", "file_error")
    finally:
        watch.close()


def test_a_form_that_fails_reports_the_files_already_written(api: Api, session: str) -> None:
    parts = [("file", ("a.txt", b"first")), ("file", ("x" * 300, b"second"))]
    refused = problem(api.http.post(f"{files(session)}/upload", files=parts), 400, "bad_path")

    assert refused["written"] == ["a.txt"]
    assert api.names(session) == ["a.txt"]
