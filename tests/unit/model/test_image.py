"""Names of images."""

from __future__ import annotations

import pytest

from atoll.model.image import HUB, Registry, parse

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "name", "server", "wanted"),
    [
        ("python", "python", HUB, "latest"),
        ("python:3.12-slim", "python", HUB, "3.12-slim"),
        ("team/tools:1", "team/tools", HUB, "1"),
        ("localhost/tools", "localhost/tools", "localhost", "latest"),
        ("localhost:5000/a/b:c", "localhost:5000/a/b", "localhost:5000", "c"),
        ("r.example.com/a", "r.example.com/a", "r.example.com", "latest"),
        ("[::1]:5000/a:1", "[::1]:5000/a", "[::1]:5000", "1"),
        (f"python@{DIGEST}", "python", HUB, DIGEST),
        (f"r.example.com:1/a/b:1@{DIGEST}", "r.example.com:1/a/b", "r.example.com:1", DIGEST),
    ],
)
def test_an_image_name_is_parsed(text: str, name: str, server: str, wanted: str) -> None:
    found = parse(text)

    assert (found.name, found.server, found.wanted) == (name, server, wanted)
    assert found.pinned(DIGEST) == f"{name}@{DIGEST}"


@pytest.mark.parametrize(
    "text",
    ["", "/srv/root", "../a", "A", "Team/a", "a b", "a:", "a@sha256:1", "http://a/b", "a//b", "a/",
     "a:1:2", "a\nb", "-a", "a" * 600, "a?x=1", "a#b", "a%2f"],
)  # fmt: skip
def test_an_invalid_image_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the name"):
        parse(text)


def test_sealed_credentials_are_not_shown() -> None:
    assert "c2VjcmV0" not in repr(Registry("r.example.com", "c2VjcmV0"))
