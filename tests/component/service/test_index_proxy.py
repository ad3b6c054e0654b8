"""The gateway of an installation, against an index over loopback."""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from atoll.drivers.shared import package_proxy
from atoll.service.packages import index_proxy
from atoll.service.packages.index import find_index, index_at
from atoll.service.packages.index_page import JSON_PAGE, PAGE_LIMIT, read_page
from atoll.service.packages.index_proxy import IndexProxy
from atoll.settings import PackageSettings
from tests.servers.index import Index

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.anyio

WHEEL = "plain-1.0-py3-none-any.whl"


@pytest.fixture
def index() -> Iterator[Index]:
    with Index(password="index-password") as running:
        yield running.add("plain", "1.0")


class World:
    def __init__(self, client: httpx.AsyncClient, messages: list[str], gateway: IndexProxy) -> None:
        self.client = client
        self.gateway = gateway
        self.messages = messages

    async def link(self, name: str = "plain") -> str:
        """URL of the first file of a package, according to the gateway."""
        page = (await self.client.get(f"/simple/{name}/")).json()
        return str(page["files"][0]["url"])


@asynccontextmanager
async def gateway(index: Index, place: Path, **settings: Any) -> AsyncIterator[World]:
    messages: list[str] = []
    given = PackageSettings(**settings)
    downloads = Path(tempfile.mkdtemp(dir=place))
    async with IndexProxy(index_at(index.url, None), given, messages.append, downloads) as running:
        server = await asyncio.start_unix_server(running.answer, str(place / "socket"))
        way = httpx.AsyncHTTPTransport(uds=str(place / "socket"))
        try:
            async with httpx.AsyncClient(
                transport=way, base_url="http://gateway", timeout=60
            ) as client:
                yield World(client, messages, running)
        finally:
            server.close()


async def test_links_of_a_page_lead_to_the_gateway_only(index: Index, tmp_path: Path) -> None:
    async with gateway(index, tmp_path) as world:
        answer = await world.client.get("/simple/plain/")
        assert answer.headers["content-type"] == JSON_PAGE
        assert "index-password" not in answer.text
        assert str(index.port) not in answer.text
        [file] = answer.json()["files"]
        assert file["filename"] == WHEEL
        assert file["url"].startswith("/files/")
        assert file["hashes"]["sha256"]
        whole = await world.client.get(file["url"])
        assert whole.content == index.packages["plain"][WHEEL]
        metadata = await world.client.get(file["url"] + ".metadata")
        assert metadata.content == index.metadata[WHEEL]


async def test_html_pages_are_converted_to_the_same_format(tmp_path: Path) -> None:
    with Index(html=True) as index:
        index.add("plain", "1.0")
        async with gateway(index, tmp_path) as world:
            [file] = (await world.client.get("/simple/plain/")).json()["files"]
            assert file["filename"] == WHEEL
            assert file["core-metadata"] is True
            assert (await world.client.get(file["url"])).status_code == 200


async def test_parts_and_sizes_of_files_can_be_requested(index: Index, tmp_path: Path) -> None:
    content = index.packages["plain"][WHEEL]
    async with gateway(index, tmp_path) as world:
        link = await world.link()
        head = await world.client.head(link)
        assert (head.status_code, head.headers["content-length"]) == (200, str(len(content)))
        part = await world.client.get(link, headers={"Range": "bytes=0-3"})
        assert (part.status_code, part.content) == (206, content[:4])
        last = await world.client.get(link, headers={"Range": "bytes=-4"})
        assert last.content == content[-4:]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/simple/"),
        ("GET", "/simple/plain"),
        ("GET", "/simple/Plain/"),
        ("GET", "/simple/plain/?to=elsewhere"),
        ("GET", "/simple/plain/json/"),
        ("GET", f"/files/{WHEEL}"),
        ("GET", f"/files/{'0' * 32}/{WHEEL}"),
        ("POST", "/simple/plain/"),
        ("DELETE", "/simple/plain/"),
    ],
)
async def test_all_other_requests_are_refused(
    index: Index, tmp_path: Path, method: str, path: str
) -> None:
    async with gateway(index, tmp_path) as world:
        assert (await world.client.request(method, path)).status_code == 403
        assert index.asked == []


async def test_a_link_is_valid_for_its_file_only(index: Index, tmp_path: Path) -> None:
    async with gateway(index, tmp_path) as world:
        link = await world.link()
        asked = len(index.asked)
        other = link.rpartition("/")[0] + "/other-1.0-py3-none-any.whl"
        assert (await world.client.get(other)).status_code == 403
        assert len(index.asked) == asked


async def test_missing_packages_and_files_are_not_found(index: Index, tmp_path: Path) -> None:
    async with gateway(index, tmp_path) as world:
        assert (await world.client.get("/simple/absent/")).status_code == 404
        link = await world.link()
        index.packages["plain"].clear()
        assert (await world.client.get(link)).status_code == 404


async def test_redirects_stay_on_the_requested_host(index: Index, tmp_path: Path) -> None:
    with Index() as elsewhere:
        elsewhere.add("moved", "1.0")
        index.odd["/simple/moved/"] = (302, {"Location": "/simple/plain/"}, b"")
        index.odd["/simple/away/"] = (302, {"Location": f"{elsewhere.url}moved/"}, b"")
        index.odd["/simple/round/"] = (302, {"Location": "/simple/round/"}, b"")
        async with gateway(index, tmp_path) as world:
            assert (await world.client.get("/simple/moved/")).status_code == 200
            assert (await world.client.get("/simple/away/")).status_code == 403
            assert (await world.client.get("/simple/round/")).status_code == 502
            link = await world.link()
            file = (302, {"Location": f"{elsewhere.url}{WHEEL}"}, b"")
            index.odd[f"/files/{WHEEL}"] = file
            assert (await world.client.get(link)).status_code == 403
            assert any("redirects" in words for words in world.messages)
        assert elsewhere.asked == []


async def test_the_password_is_sent_to_the_index_but_not_to_linked_hosts(
    index: Index, tmp_path: Path
) -> None:
    with Index(password="another") as elsewhere:
        elsewhere.add("plain", "1.0")
        link = {"filename": WHEEL, "url": f"http://127.0.0.1:{elsewhere.port}/files/{WHEEL}"}
        page = json.dumps({"meta": {}, "name": "plain", "files": [{**link, "hashes": {}}]})
        index.odd["/simple/plain/"] = (200, {"Content-Type": JSON_PAGE}, page.encode())
        allowed = f"127.0.0.1:{elsewhere.port}"
        async with gateway(index, tmp_path, private_hosts=allowed) as world:
            # It requires a password, and was given none.
            assert (await world.client.get(await world.link())).status_code == 502
        assert elsewhere.asked == [f"/files/{WHEEL}"]
        elsewhere.password = None
        async with gateway(index, tmp_path / "..", private_hosts=allowed) as world:
            assert (await world.client.get(await world.link())).status_code == 200


async def test_a_file_that_is_too_large_is_refused(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{index_proxy.__name__}.MAX_FILE_SIZE", 1024 * 1024)
    index.add("large", "1.0", files={"large.txt": "x" * (2 * 1024 * 1024)})
    async with gateway(index, tmp_path) as world:
        assert (await world.client.get(await world.link("large"))).status_code == 413
        assert any("larger than" in words for words in world.messages)


async def test_a_download_larger_than_announced_is_aborted(index: Index, tmp_path: Path) -> None:
    index.add("large", "1.0", files={"large.txt": "x" * (40 * 1024 * 1024)})
    async with gateway(index, tmp_path, disk=16 * 1024 * 1024) as world:
        with pytest.raises(httpx.HTTPError):
            await world.client.get(await world.link("large"))
        assert any(
            "limit was exceeded" in words or "larger than the allowed" in words
            for words in world.messages
        )


async def test_a_broken_index_is_reported(index: Index, tmp_path: Path) -> None:
    index.odd["/simple/broken/"] = (500, {}, b"oh")
    index.odd["/simple/garbled/"] = (200, {"Content-Type": JSON_PAGE}, b"[")
    async with gateway(index, tmp_path) as world:
        assert (await world.client.get("/simple/broken/")).status_code == 502
        assert (await world.client.get("/simple/garbled/")).status_code == 502
        assert len(world.messages) == 2
        assert (await world.client.get("/simple/plain/")).status_code == 200


@pytest.mark.parametrize(
    "url",
    ["http://[", "http://127.0.0.1:99999999/x", "http://127.0.0.1:port/x", "http://\x01/x", "//"],
)
async def test_a_link_with_an_invalid_address_is_reported(
    index: Index, tmp_path: Path, url: str
) -> None:
    page = {"files": [{"filename": WHEEL, "url": url, "hashes": {}}]}
    index.odd["/simple/plain/"] = 200, {"Content-Type": JSON_PAGE}, json.dumps(page).encode()
    async with gateway(index, tmp_path) as world:
        answer = await world.client.get("/simple/plain/")
        if answer.status_code == 200 and (listed := answer.json()["files"]):
            answer = await world.client.get(listed[0]["url"])
        assert answer.status_code in (200, 502)
        assert (answer.status_code == 200) == (not world.messages)


async def test_a_deeply_nested_page_is_refused(index: Index, tmp_path: Path) -> None:
    deep = b"[" * 1_000_000
    index.odd["/simple/plain/"] = 200, {"Content-Type": JSON_PAGE}, deep
    async with gateway(index, tmp_path) as world:
        assert (await world.client.get("/simple/plain/")).status_code == 502


async def test_a_page_that_is_slow_to_parse_blocks_nothing_else(
    index: Index, tmp_path: Path
) -> None:
    hostile = b'{"files": [' + b"[]," * (PAGE_LIMIT // 3 - 10) + b"[]]}"
    index.odd["/simple/hostile/"] = 200, {"Content-Type": JSON_PAGE}, hostile
    index.odd["/simple/larger/"] = 200, {"Content-Type": JSON_PAGE}, b" " * (PAGE_LIMIT + 1)
    index.hold("/simple/plain/")
    used = resource.getrusage(resource.RUSAGE_SELF)
    async with gateway(index, tmp_path) as world:
        assert (await world.client.get("/simple/hostile/")).status_code == 502
        assert (await world.client.get("/simple/larger/")).status_code == 413
        assert "hostile" in world.messages[0]
    after = resource.getrusage(resource.RUSAGE_SELF)
    # KiB: what reading it here would have taken is a gigabyte.
    assert after.ru_maxrss - used.ru_maxrss < 300 * 1024


@pytest.mark.parametrize(
    "place",
    [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "169.254.169.254",
        "10.0.0.1",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
    ],
)
async def test_a_link_to_an_address_that_is_not_public_is_refused(
    index: Index, tmp_path: Path, place: str
) -> None:
    with Index() as elsewhere:
        elsewhere.add("plain", "1.0")
        link = {"filename": WHEEL, "url": f"http://{place}:{elsewhere.port}/files/{WHEEL}"}
        page = json.dumps({"files": [{**link, "hashes": {}, "core-metadata": True}]})
        index.odd["/simple/plain/"] = (200, {"Content-Type": JSON_PAGE}, page.encode())
        async with gateway(index, tmp_path) as world:
            link_ = await world.link()
            assert (await world.client.get(link_)).status_code == 403
            assert (await world.client.head(link_)).status_code == 403
            assert (await world.client.get(link_ + ".metadata")).status_code == 403
            assert "whose address is not public" in world.messages[0]
        assert elsewhere.asked == []


async def test_a_wheel_is_kept_if_it_matches_its_hash(index: Index, tmp_path: Path) -> None:
    content = index.packages["plain"][WHEEL]
    async with gateway(index, tmp_path) as world:
        link = await world.link()
        await world.client.get(link, headers={"Range": "bytes=0-3"})
        await world.client.head(link)
        assert world.gateway.wheels() == []
        for _ in range(2):
            await world.client.get(link)
        [wheel] = world.gateway.wheels()
        assert wheel.path.read_bytes() == content
        assert wheel.digest == hashlib.sha256(content).hexdigest()
        assert list(wheel.path.parent.iterdir()) == [wheel.path]
    async with gateway(index, tmp_path) as world:
        link = await world.link()
        index.packages["plain"][WHEEL] = content + b"more"
        with pytest.raises(httpx.HTTPError):
            await world.client.get(link)
        assert world.gateway.wheels() == []
        assert "hashes" in world.messages[0]


async def test_a_silent_index_is_reported(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.hold("/simple/plain/")
    monkeypatch.setattr(package_proxy, "READ_TIMEOUT", 0.2)
    async with gateway(index, tmp_path) as world:
        assert (await world.client.get("/simple/plain/")).status_code == 502
        assert world.messages == ["The package index does not answer (ReadTimeout)."]


async def test_data_that_is_not_http_gets_no_response(index: Index, tmp_path: Path) -> None:
    async with gateway(index, tmp_path) as world:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
        writer.write(b"\x16\x03\x01 hello\r\n\r\n" + b"x" * 100_000)
        assert await reader.read() == b""
        writer.close()
        assert (await world.client.get("/simple/plain/")).status_code == 200


# Which index


async def test_settings_select_the_index_and_never_show_its_password() -> None:
    settings = PackageSettings(index_url="http://me:a%20word@host.invalid:8080/simple/")
    found = await find_index(settings)
    assert found.url == "http://host.invalid:8080/simple"
    assert found.page("x") == "http://host.invalid:8080/simple/x/"
    assert found.auth == ("me", "a word")
    assert found.auth_for("http://host.invalid:8080/files/x") == ("me", "a word")
    assert found.auth_for("https://host.invalid:8080/files/x") is None
    assert found.auth_for("http://other.invalid/") is None
    assert "word" not in repr(found) + repr(settings)


async def test_variables_of_uv_and_pip_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://pip.invalid/simple")
    assert (await find_index(PackageSettings())).url == "http://pip.invalid/simple"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "named=http://uv.invalid/simple/")
    assert (await find_index(PackageSettings())).url == "http://uv.invalid/simple"


def test_only_links_that_can_be_fetched_are_kept() -> None:
    page = (
        b'<base href="/deep/"><a href="a-1.tar.gz#sha256=ab">a</a>'
        b'<a href="javascript:alert(1)">b</a><a href="file:///etc/passwd">c</a>'
        b'<a href="https://other.invalid/d-1.zip" data-requires-python="&gt;=3.8" data-yanked>d</a>'
    )
    files = read_page(page, "text/html", "http://host.invalid/simple/a/")
    assert [(name, url) for name, url, _ in files] == [
        ("a-1.tar.gz", "http://host.invalid/deep/a-1.tar.gz"),
        ("d-1.zip", "https://other.invalid/d-1.zip"),
    ]
    assert files[0][2]["hashes"] == {"sha256": "ab"}
    assert files[1][2]["requires-python"] == ">=3.8"
    assert files[1][2]["yanked"] is True
