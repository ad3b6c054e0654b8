"""
How names become parts of a URL.

A name stays inside its own part of the URL whatever it holds: `..` is sent encoded for the server
to judge, since an HTTP client would otherwise resolve it and so reach another resource.
"""

from __future__ import annotations

import os
from urllib.parse import quote

from atoll.sdk.arguments import wrong_type

WORKSPACE = "/workspace"


def url_segment(name: str) -> str:
    """An id, or one part of a path, as one part of a URL."""
    if not isinstance(name, str):
        raise wrong_type("id", "a string", name)
    if set(name) == {"."}:
        return "%2E" * len(name)
    return quote(name, safe="", errors="surrogateescape")


def workspace_path(path: str | os.PathLike[str]) -> str:
    """A path as the API writes it: relative to the workspace; `/workspace/a` is `a`."""
    if not isinstance(path, str | os.PathLike):
        raise wrong_type("path", "a string", path)
    text = os.fspath(path)
    if text == WORKSPACE or text.startswith(WORKSPACE + "/"):
        text = text[len(WORKSPACE) :].lstrip("/")
    return text or "."


def url_path(path: str | os.PathLike[str]) -> str:
    """A path in the workspace as the end of a URL."""
    text = workspace_path(path)
    # An absolute path must reach the server as one: an empty first part would be lost on the way.
    root, text = ("%2F", text[1:]) if text.startswith("/") else ("", text)
    return root + "/".join(url_segment(part) for part in text.split("/"))


def json_path(path: str | os.PathLike[str]) -> str | dict[str, str]:
    """A path in the workspace as a member of a JSON document."""
    text = workspace_path(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        return {"encoded": quote(text.encode("utf-8", "surrogateescape"))}
    return text
