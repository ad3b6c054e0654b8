"""
What a Dockerfile may not ask for.

The commands of a Dockerfile run in containers of their own, which the settings keep from the
network. `ADD` of a URL is different: the engine itself fetches it, from wherever the engine stands.
"""

from __future__ import annotations

import re

from atoll.errors import InvalidRequest

_CONTINUED = re.compile(r"[\\`][ \t]*\r?\n")
_COMMENT = re.compile(r"^[ \t]*#.*(?:\n|$)", re.MULTILINE)
_ADD = re.compile(r"^\s*(?:ONBUILD\s+)*ADD\s+(?P<rest>.*)$", re.IGNORECASE | re.MULTILINE)
_FROM = re.compile(r"^\s*FROM\s+\S", re.IGNORECASE | re.MULTILINE)
_REMOTE = re.compile(r"://|\$|git@", re.IGNORECASE)


def check(text: str, *, network: bool) -> None:
    """Raises `InvalidRequest`; without `network`, also where the engine would fetch something."""
    # Comments first: one between the lines of an instruction does not end it.
    text = _CONTINUED.sub(" ", _COMMENT.sub("", text))
    if _FROM.search(text) is None:
        raise InvalidRequest(
            "dockerfile: it has no FROM.", code="dockerfile_invalid", field="dockerfile"
        )
    if network:
        return
    for found in _ADD.finditer(text):
        if _REMOTE.search(found["rest"]):
            raise InvalidRequest(
                "dockerfile: ADD of a URL or of a variable is refused, because builds have no "
                "network here (ATOLL_DOCKER__BUILD_NETWORK). Put the file in the build context.",
                code="dockerfile_invalid",
                field="dockerfile",
            )
