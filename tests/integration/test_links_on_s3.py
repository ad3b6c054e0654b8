"""Links that lead straight to a real S3 server, and back here when it is dead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.api import V1, Api, answer, problem
from tests.harness import Server
from tests.servers.s3 import S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MiB = 1024 * 1024


@pytest.fixture
def api(bubblewrap: str, own_s3: S3Server, tmp_path: Path) -> Iterator[Api]:
    directory = tmp_path / "data"
    directory.mkdir()
    env = own_s3.environment(ATOLL_POOL__SIZE="1")
    with Server(directory, **env) as server, server.client() as http:
        yield Api(http)


def keys(s3: S3Server, kind: str, session: str) -> set[str]:
    prefix = f"atoll/{kind}/{session}"
    return {item["path"] for page in s3.store().list(prefix) for item in page}


def presign(api: Api, session: str, **body: Any) -> dict[str, Any]:
    return answer(api.http.post(f"{V1}/sessions/{session}/files/presign", json=body))


def test_a_file_is_transferred_directly_to_and_from_s3(api: Api, own_s3: S3Server) -> None:
    session = api.create()["id"]
    content = bytes(range(256)) * (20 * MiB // 256)
    api.put(session, "out", content)
    first = presign(api, session, path="out")
    again = presign(api, session, path="out")

    assert first["native"] is True
    assert first["url"].startswith(own_s3.endpoint)
    assert httpx.get(first["url"], timeout=60).content == content
    part = httpx.get(again["url"], headers={"Range": "bytes=1-2"}, timeout=60)
    assert part.content == content[1:3]
    assert len(keys(own_s3, "exports", session)) == 1
    # The link is for this object and method, and for nothing that S3 could be asked to make of it.
    url = str(first["url"])
    assert "html" not in httpx.get(url, timeout=60).headers["content-type"]
    [key] = keys(own_s3, "exports", session)
    for method, changed in (
        ("PUT", url), ("DELETE", url), ("GET", url.replace("X-Amz-Expires=", "X-Amz-Expires=1")),
        ("GET", url.replace(key, "ready")), ("GET", url.replace(key, f"{key}/../../../ready")),
        ("GET", f"{url}&response-content-type=text/html"),
    ):  # fmt: skip
        assert httpx.request(method, changed, timeout=60).status_code == 403, (method, changed)
    api.put(session, "out", b"another")
    assert httpx.get(presign(api, session, path="out")["url"], timeout=60).content == b"another"
    assert len(keys(own_s3, "exports", session)) == 2

    put = presign(api, session, path="in/file", method="PUT", direct=True)
    assert (put["native"], put["method"]) == (True, "PUT")
    problem(httpx.post(put["complete_url"], timeout=60), 404, "upload_not_found")
    hostile = {"Content-Type": "text/html", "Content-Encoding": "gzip"}
    assert httpx.put(put["url"], content=content, headers=hostile, timeout=60).status_code == 200
    assert len(keys(own_s3, "uploads", session)) == 1
    done = httpx.post(put["complete_url"], timeout=60)
    assert answer(done, 201)["size"] == len(content)
    assert keys(own_s3, "uploads", session) == set()
    problem(httpx.post(put["complete_url"], timeout=60), 404, "upload_not_found")
    problem(httpx.get(put["complete_url"], timeout=60), 403, "signed_url_invalid")
    assert api.http.get(f"{V1}/sessions/{session}/files/in/file").content == content
    assert presign(api, session, path="a", method="PUT")["native"] is False


def test_links_lead_to_this_server_while_s3_is_unavailable(api: Api, own_s3: S3Server) -> None:
    session = api.create()["id"]
    api.put(session, "out", b"content")
    own_s3.kill()
    link = presign(api, session, path="out")

    assert link["native"] is False
    assert httpx.get(link["url"], timeout=60).content == b"content"


def test_links_lead_to_this_server_where_clients_cannot_reach_s3(
    bubblewrap: str, own_s3: S3Server, tmp_path: Path
) -> None:
    env = own_s3.environment(ATOLL_POOL__SIZE="0", ATOLL_BLOB__DIRECT_LINKS="false")
    with Server(tmp_path, **env) as server, server.client() as http:
        api = Api(http)
        session = api.create()["id"]
        api.put(session, "out", b"content")
        get = presign(api, session, path="out")
        put = presign(api, session, path="in", method="PUT", direct=True)

        assert (get["native"], put["native"]) == (False, False)
        assert httpx.get(get["url"], timeout=60).content == b"content"
        assert httpx.put(put["url"], content=b"other", timeout=60).is_success
        assert keys(own_s3, "exports", session) == set()
