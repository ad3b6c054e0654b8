"""
What a Dockerfile may not ask for.

The commands of a Dockerfile run in containers of their own, which the settings keep from the
network. `ADD` of a URL is different: the engine itself fetches it, from wherever the engine stands.
"""

from __future__ import annotations

import re

from atoll.errors import InvalidRequest

_COMMENT = re.compile(r"^[ \t]*#.*(?:\n|$)", re.MULTILINE)
_ADD = re.compile(r"^\s*(?:ONBUILD\s+)*ADD\s+(?P<rest>.*)$", re.IGNORECASE | re.MULTILINE)
_FROM = re.compile(r"^\s*FROM\s+\S", re.IGNORECASE | re.MULTILINE)
_OWNER = re.compile(r"--(?:chown|chmod)=\S+")
_REMOTE = re.compile(r"[:$@\\`]")
"""What an address has, or what may become one when the engine reads it."""
ESCAPES = ("\\", "`")
"""A line that ends with it goes on. A Dockerfile chooses; either way nothing is to be fetched."""


def check(text: str, *, network: bool) -> None:
    """Raises `InvalidRequest`; without `network`, also where the engine would fetch something."""
    # Comments first: one between the lines of an instruction does not end it.
    text = _COMMENT.sub("", text)
    readings = [_joined(text, escape) for escape in ESCAPES]
    if not any(map(_FROM.search, readings)):
        raise InvalidRequest(
            "dockerfile: it has no FROM.", code="dockerfile_invalid", field="dockerfile"
        )
    if network:
        return
    for reading in readings:
        for found in _ADD.finditer(reading):
            if _REMOTE.search(_OWNER.sub("", found["rest"])):
                raise InvalidRequest(
                    "dockerfile: ADD of a URL, or of what may become one (: $ @ and escapes), is "
                    "refused, because builds have no network here (ATOLL_DOCKER__BUILD_NETWORK). "
                    "Put the file in the build context, and use COPY.",
                    code="dockerfile_invalid",
                    field="dockerfile",
                )


def _joined(text: str, escape: str) -> str:
    """With lines that go on as one. Empty ones between them are nothing to the engine."""
    return re.sub(rf"{re.escape(escape)}[ \t]*\r?\n(?:[ \t]*\r?\n)*", "", text)
