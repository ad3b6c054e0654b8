"""
Refuses Dockerfiles that would make the engine itself use the network.

The commands of a Dockerfile run in containers, whose network the settings restrict. `ADD` with a
URL is different: the engine downloads it, from the network that the engine is in.
"""

from __future__ import annotations

import re

from atoll.errors import InvalidRequest

_COMMENT = re.compile(r"^[ \t]*#.*(?:\n|$)", re.MULTILINE)
_ADD = re.compile(r"^\s*(?:ONBUILD\s+)*ADD\s+(?P<rest>.*)$", re.IGNORECASE | re.MULTILINE)
_FROM = re.compile(r"^\s*FROM\s+\S", re.IGNORECASE | re.MULTILINE)
_OWNER = re.compile(r"--(?:chown|chmod)=\S+")
_REMOTE = re.compile(r"[:$@\\`]")
"""Characters of a URL, and those from which the engine may expand one."""
ESCAPES = ("\\", "`")
"""
Characters that continue a line. A Dockerfile can choose; it is checked for both.
"""


def check(text: str, *, network: bool) -> None:
    """Raise `InvalidRequest` if there is no FROM or, without `network`, an ADD of a URL."""
    # Comments first: one between the lines of an instruction does not end the instruction.
    text = _COMMENT.sub("", text)
    readings = [_join_lines(text, escape) for escape in ESCAPES]
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
                    "dockerfile: ADD of a URL, or of a source with : $ @ or an escape character, "
                    "which may become one, is not allowed because builds have no network here "
                    "(ATOLL_DOCKER__BUILD_NETWORK). Upload the file with the build files and use "
                    "COPY.",
                    code="dockerfile_invalid",
                    field="dockerfile",
                )


def _join_lines(text: str, escape: str) -> str:
    """Join continued lines. The engine ignores empty lines between them."""
    return re.sub(rf"{re.escape(escape)}[ \t]*\r?\n(?:[ \t]*\r?\n)*", "", text)
