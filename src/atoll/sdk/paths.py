"""
Encodes ids and file paths for URLs and request bodies.

A name never leaves its segment of the URL. `..` is sent encoded, because an HTTP client would
otherwise resolve it and so request another resource.
"""

from __future__ import annotations

import os
from urllib.parse import quote

from atoll.sdk.arguments import wrong_type

WORKSPACE = "/workspace"


def url_segment(name: str) -> str:
    """An id, or one component of a path, as a segment of a URL."""
    if not isinstance(name, str):
        raise wrong_type("id", "a string", name)
    if set(name) == {"."}:
        return "%2E" * len(name)
    return quote(name, safe="", errors="surrogateescape")


def workspace_path(path: str | os.PathLike[str]) -> str:
    """A path relative to the workspace, as in the API: `a` for `/workspace/a`."""
    if not isinstance(path, str | os.PathLike):
        raise wrong_type("path", "a string", path)
    text = os.fspath(path)
    if text == WORKSPACE or text.startswith(WORKSPACE + "/"):
        text = text[len(WORKSPACE) :].lstrip("/")
    return text or "."


def url_path(path: str | os.PathLike[str]) -> str:
    """A path in the workspace as the last segments of a URL."""
    text = workspace_path(path)
    # The encoded slash keeps the path absolute; an empty first segment would be removed.
    root, text = ("%2F", text[1:]) if text.startswith("/") else ("", text)
    return root + "/".join(url_segment(part) for part in text.split("/"))


def json_path(path: str | os.PathLike[str]) -> str | dict[str, str]:
    """A path in the workspace for a JSON body. Encoded if it is not UTF-8."""
    text = workspace_path(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        return {"encoded": quote(text.encode("utf-8", "surrogateescape"))}
    return text
