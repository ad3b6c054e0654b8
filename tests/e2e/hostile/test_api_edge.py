"""Requests that are meant to hurt: to block the server, to look around, or to mislead others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from tests import preloaded
from tests.e2e.api import V1, Api, answer, eventually, problem
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

MANY = 200_000
MANY_LISTS = b"[" + b"[]," * MANY + b"1]"
MANY_KEYS = b",".join(b'"k%d":1' % number for number in range(MANY))


@pytest.fixture(scope="module")
def server(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("edge"), ATOLL_POOL__SIZE="0") as started:
        image = started.data_dir / "rootfs" / "image"
        (image / "usr" / "bin").mkdir(parents=True)
        (image / "usr" / "bin" / "python3").touch()
        yield started


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[Api]:
    with server.client() as http:
        yield Api(http)


@pytest.fixture(scope="module")
def reader(server: Server) -> Iterator[httpx.Client]:
    """A client whose key may only read."""
    words = ("key", "create", "reader", "--scope", "read", "--data-dir", str(server.data_dir))
    headers = {"Authorization": f"Bearer {preloaded.run(*words).stdout.strip()}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30) as http:
        # A running server learns of keys that another process makes within seconds.
        eventually(lambda: http.get(f"{V1}/sessions").status_code == 200)
        yield http


@pytest.mark.quick
@pytest.mark.parametrize(
    "path", ["/sessions/none/execute", "/sessions", "/invocations", "/templates"]
)
@pytest.mark.parametrize(
    "body",
    [b'{"code": "1", "event": {"a": %s}}' % MANY_LISTS, b'{"code": "1", %s}' % MANY_KEYS],
    ids=["lists", "keys"],
)
def test_json_of_very_many_values_is_refused_before_it_is_parsed(
    api: Api, path: str, body: bytes
) -> None:
    problem(api.http.post(f"{V1}{path}", content=body), 413, "too_many_values")
    in_pieces = api.http.post(f"{V1}{path}", content=iter([body[:1000], body[1000:]]))
    problem(in_pieces, 413, "too_many_values")


def test_long_code_with_many_commas_is_accepted(api: Api) -> None:
    session = api.create()["id"]
    code = f"print(len([{'0,' * 150_000}]))"
    assert api.run(session, code)["stdout"] == "150000\n"
    api.end(session)


def test_errors_of_a_template_do_not_reveal_which_files_the_host_has(
    server: Server, api: Api
) -> None:
    def refused(**fields: str) -> str:
        """The problem document without the path that was asked about."""
        found = api.http.post(f"{V1}/templates", json={"id": "t", "name": "t", **fields})
        assert found.status_code == 422, found.text
        return found.text.replace(fields.get("python", "-"), "")

    image = str(server.data_dir / "rootfs" / "image")
    here = refused(image=image, python="/../../../../../../../../etc/passwd")
    assert here == refused(image=image, python="/../../../../../../../../etc/no-such-file")
    there = refused(python="/etc/passwd")
    assert there == refused(python="/etc/no-such-file")
    for place in ("/proc/1/root", "/proc/self/cwd", "/proc/1/fd/0", "/dev/null", "/root/../etc"):
        refused(image=place)


def test_a_read_only_key_cannot_start_a_session(api: Api, reader: httpx.Client) -> None:
    session = api.create()["id"]
    made = api.run(session, "open('a.txt', 'w').write('a')")
    artifacts = f"{V1}/executions/{made['execution_id']}/artifacts"
    link = answer(reader.get(artifacts))["items"][0]["download_url"]
    assert httpx.get(link).text == "a"
    answer(api.http.post(f"{V1}/sessions/{session}/stop"))
    eventually(lambda: api.get(session)["status"] == "stopped")
    for path in ("/files", "/files/a.txt", "/files/tree", "/files/a.txt?metadata=true"):
        refused = reader.get(f"{V1}/sessions/{session}{path}")
        assert "may do more than read" in problem(refused, 409, "session_not_running")["detail"]
    problem(httpx.get(link), 409, "session_not_running")
    assert answer(reader.get(f"{V1}/sessions/{session}"))["status"] == "stopped"
    # A key that may do more does start it.
    assert api.http.get(f"{V1}/sessions/{session}/files/a.txt").text == "a"
    assert reader.get(f"{V1}/sessions/{session}/files/a.txt").text == "a"
    api.end(session)


def test_links_do_not_contain_the_host_header_of_the_request(api: Api) -> None:
    session = api.create()["id"]
    made = api.run(session, "open('a.txt', 'w').write('a')")
    wanted = {"path": "a.txt", "method": "GET"}
    presign = f"{V1}/sessions/{session}/files/presign"
    artifacts = f"{V1}/executions/{made['execution_id']}/artifacts"
    evil = {"Host": "evil.example"}
    refused = problem(api.http.post(presign, json=wanted, headers=evil), 400, "public_url_needed")
    assert "ATOLL_PUBLIC_URL" in refused["detail"]
    assert answer(api.http.get(artifacts, headers=evil))["items"][0]["download_url"] is None
    url = answer(api.http.post(presign, json=wanted))["url"]
    assert httpx.get(url).text == "a"
    api.end(session)
