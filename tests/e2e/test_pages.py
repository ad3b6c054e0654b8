"""What a browser is shown: the start page and the documentation, without the internet."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from atoll.version import __version__
from tests.e2e.api import V1, answer
from tests.harness import Server
from tests.missing import missing

pytestmark = pytest.mark.quick

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.fixture(scope="module")
def browser(server: Server) -> Iterator[httpx.Client]:
    """Without a key, as a browser comes."""
    with httpx.Client(base_url=server.url, headers=BROWSER, timeout=30) as http:
        yield http


class Page(HTMLParser):
    """What a page loads or links to, the scripts in it, and its text."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__()
        self.links: list[str] = []
        self.inline_scripts = 0
        self.words = ""
        self.feed(response.text)
        self.urls = [urljoin(str(response.url), link) for link in self.links]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [given[name] or "" for name in ("src", "href") if name in given]
        self.inline_scripts += tag == "script" and "src" not in given
        assert not any(name.startswith("on") or name == "style" for name in given)

    def handle_data(self, data: str) -> None:
        self.words += data


def policy(response: httpx.Response) -> dict[str, list[str]]:
    found = {}
    for directive in response.headers["content-security-policy"].split(";"):
        name, *sources = directive.split()
        found[name] = sources
    return found


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_needs_no_key_and_no_other_origin(browser: httpx.Client, path: str) -> None:
    response = browser.get(path)

    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert response.headers["x-content-type-options"] == "nosniff"
    page = Page(response)
    assert page.inline_scripts == 0
    for url in page.urls:
        if not url.startswith("data:"):
            assert urlsplit(url).netloc == urlsplit(str(browser.base_url)).netloc
            assert browser.get(url).status_code == 200, url
    allowed = policy(response)
    assert allowed["default-src"] == ["'none'"]
    assert allowed["frame-ancestors"] == ["'none'"]
    for name, sources in allowed.items():
        for source in sources:
            assert source in ("'none'", "'self'", "data:") or name == "style-src"
    assert "'unsafe-inline'" not in allowed.get("script-src", [])


def test_the_start_page_has_a_line_to_paste_and_no_secret(
    browser: httpx.Client, server: Server
) -> None:
    page = Page(browser.get("/"))

    assert __version__ in page.words
    assert "atoll doctor" in page.words
    assert server.key not in page.words
    [line] = re.findall(r"curl (?:.*\\\n)*.*", page.words)
    assert "$ATOLL_API_KEY" in line
    if shutil.which("curl") is None:
        missing("curl is not installed")
    done = subprocess.run(
        ["sh", "-c", line],
        env={"ATOLL_API_KEY": server.key, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=True,
    )
    session = json.loads(done.stdout)["id"]
    headers = {"Authorization": f"Bearer {server.key}"}
    assert browser.delete(f"{V1}/sessions/{session}", headers=headers).is_success


@pytest.mark.parametrize("host", ["a'$(id)", "<b>", "x;id", "a b"])
def test_an_invalid_host_header_is_not_printed(browser: httpx.Client, host: str) -> None:
    response = browser.get("/", headers={"Host": host})

    assert response.status_code in (200, 400)
    assert host not in response.text


def test_other_clients_get_json(browser: httpx.Client) -> None:
    found = answer(browser.get("/", headers={"Accept": "*/*"}))

    assert found == {"name": "Atoll", "version": __version__, "documentation": "/docs"}


def test_the_documentation_loads_the_document_of_this_server_and_asks_for_a_key(
    browser: httpx.Client,
) -> None:
    """Runs the page's own script; no browser is needed to see what it asks Swagger UI for."""
    if shutil.which("node") is None:
        missing("node is not installed")
    bundle = browser.get("/docs/swagger-ui-bundle.js")
    assert bundle.headers["content-type"].startswith("text/javascript")
    assert "SwaggerUIBundle" in bundle.text
    script = browser.get("/docs/start.js").text
    program = f"const SwaggerUIBundle = (o) => console.log(JSON.stringify(o));\n{script}"
    done = subprocess.run(["node", "-e", program], capture_output=True, check=True)
    options = json.loads(done.stdout)

    # Else Swagger UI sends the address to a service on the internet.
    assert options["validatorUrl"] is None
    document = answer(browser.get(urljoin(f"{browser.base_url}/docs", options["url"])))
    # What makes "Authorize" appear, and its key be sent.
    assert document["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    assert document["security"] == [{"key": []}]
