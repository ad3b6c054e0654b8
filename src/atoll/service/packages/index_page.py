"""
Parses a page of the package index, and writes it anew for an installation.

This file is run as a program and imports the standard library alone. The index may be hostile: a
few megabytes of JSON or HTML can take gigabytes of memory and seconds of CPU time. So a process
with resource limits parses the page, and not the control plane.

It reads a line of JSON (name of the package, kind and address of the page) and the page from its
standard input. It writes a line with the number of files, a line for each (a JSON array of token,
file name, address, whether there is metadata, and hashes), and the page in the form of PEP 691 in
which each link leads to `/files/<token>/<file name>`.
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import sys
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

JSON_PAGE = "application/vnd.pypi.simple.v1+json"
PAGE_LIMIT = 16 * 1024 * 1024
"""Bytes. The largest pages of the public index, with tens of thousands of files, have half."""
MAX_FILES = 50_000
"""Files of one package."""
MEMORY = 512 * 1024 * 1024
"""Address space in bytes: several times what a page with that many files needs."""
CPU_SECONDS = 20

TOLD = ("hashes", "requires-python", "size", "upload-time", "yanked", "core-metadata", "gpg-sig")
HASH = re.compile(r"[0-9a-f]{32,128}")


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    name, kind, url = json.loads(sys.stdin.buffer.readline())
    try:
        links, page = rewritten(name, sys.stdin.buffer.read(PAGE_LIMIT + 1), kind, url)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError):
        sys.exit(1)
    lines = [str(len(links)), *map(json.dumps, links)]
    sys.stdout.buffer.write("\n".join(lines).encode() + b"\n" + page)
    sys.stdout.buffer.flush()


def rewritten(
    name: str, content: bytes, kind: str, url: str
) -> tuple[list[tuple[str, str, str, bool, dict[str, str]]], bytes]:
    links, listed = [], []
    for file, address, about in read_page(content, kind, url):
        # Deterministic, so that a page that is requested again has the same links.
        token = hashlib.sha256(f"{file}\0{address}".encode()).hexdigest()[:32]
        hashes = {
            key: value.lower()
            for key, value in about["hashes"].items()
            if isinstance(value, str) and HASH.fullmatch(value.lower())
        }
        links.append((token, file, address, bool(about.get("core-metadata")), hashes))
        listed.append({"filename": file, "url": f"/files/{token}/{quote(file)}", **about})
    page = {"meta": {"api-version": "1.0"}, "name": name, "files": listed}
    return links, json.dumps(page).encode()


def read_page(content: bytes, kind: str, url: str) -> list[tuple[str, str, dict[str, Any]]]:
    """
    Name, URL and PEP 691 fields of each file. Raises `ValueError` and other errors for malformed
    pages.
    """
    if len(content) > PAGE_LIMIT:
        raise ValueError("the page is too large")
    if kind == JSON_PAGE:
        files = [_from_json(item, url) for item in json.loads(content)["files"]]
    else:
        files = _from_html(content.decode("utf-8", "replace"), url)
    if len(files) > MAX_FILES:
        raise ValueError("too many files")
    return [file for file in files if file is not None]


def _from_json(item: dict[str, Any], base: str) -> tuple[str, str, dict[str, Any]] | None:
    about = {name: item[name] for name in TOLD if name in item}
    if "core-metadata" not in about and "dist-info-metadata" in item:
        about["core-metadata"] = item["dist-info-metadata"]
    about.setdefault("hashes", {})
    return _file(str(item["filename"]), urljoin(base, str(item["url"])), about)


def _file(name: str, url: str, about: dict[str, Any]) -> tuple[str, str, dict[str, Any]] | None:
    if urlsplit(url).scheme not in ("http", "https") or not name or "/" in name:
        return None
    return name, urldefrag(url).url, about


def _from_html(text: str, url: str) -> list[tuple[str, str, dict[str, Any]] | None]:
    """PEP 503: an anchor for each file."""
    from html.parser import HTMLParser

    files: list[tuple[str, str, dict[str, Any]] | None] = []

    class Page(HTMLParser):
        base = url

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            given = dict(attrs)
            href = given.get("href")
            if tag == "base" and href:
                self.base = urljoin(self.base, href)
            if tag == "a" and href and len(files) <= MAX_FILES:
                files.append(_from_anchor(given, urljoin(self.base, href)))

    parser = Page(convert_charrefs=True)
    parser.feed(text)
    return files


def _from_anchor(
    given: dict[str, str | None], address: str
) -> tuple[str, str, dict[str, Any]] | None:
    url, fragment = urldefrag(address)
    about: dict[str, Any] = {"hashes": _hashes(fragment)}
    if given.get("data-requires-python"):
        about["requires-python"] = given["data-requires-python"]
    if "data-yanked" in given:
        about["yanked"] = given["data-yanked"] or True
    metadata = given.get("data-core-metadata", given.get("data-dist-info-metadata"))
    if metadata:
        about["core-metadata"] = _hashes(metadata) or metadata == "true"
    return _file(unquote(urlsplit(url).path.rpartition("/")[2]), url, about)


def _hashes(fragment: str) -> dict[str, str]:
    name, _, value = fragment.partition("=")
    return {name: value} if name.startswith(("sha", "md5", "blake")) and value else {}


if __name__ == "__main__":
    main()
