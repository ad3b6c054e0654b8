"""Names of images, and what is recorded of one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

HUB = "docker.io"
"""The registry of names that name none."""

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_SERVER = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?"
_REFERENCE = re.compile(
    rf"(?P<name>(?:(?P<server>{_SERVER})/)?{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
SERVER = r"^[A-Za-z0-9\[][A-Za-z0-9.:\]-]{0,254}$"
"""What a registry's address is made of: host and port."""
LONGEST = 512


@dataclass(frozen=True, slots=True)
class Reference:
    """`name:tag`, `name@digest` or `name:tag@digest`, where the digest is what counts."""

    name: str
    server: str
    tag: str
    """Empty when there is a digest alone."""
    digest: str = ""

    @property
    def wanted(self) -> str:
        """What is asked for of the repository `name`."""
        return self.digest or self.tag

    def pinned(self, digest: str) -> str:
        return f"{self.name}@{digest}"


def parse(text: str) -> Reference:
    """Raises `ValueError` when it is none."""
    found = _REFERENCE.fullmatch(text) if len(text) <= LONGEST else None
    if found is None:
        raise ValueError("not the name of an image")
    server, _, rest = text.partition("/")
    is_server = bool(rest) and ("." in server or ":" in server or server == "localhost")
    if found["server"] is not None and not is_server and found["server"] != server.lower():
        raise ValueError("not the name of an image")
    digest = found["digest"] or ""
    return Reference(
        name=found["name"],
        server=server if is_server else HUB,
        tag=found["tag"] or ("" if digest else "latest"),
        digest=digest,
    )


@dataclass(frozen=True, slots=True)
class Registry:
    """Credentials of the registry that a template's image comes from."""

    server: str
    sealed: str = field(repr=False)
    """Encrypted, for this template and this server alone."""


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """What is recorded of the image that a version of a template was built to."""

    digest: str | None = None
    """That of its manifest, where it came from a registry: by it another node gets the same."""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    """The image's own; what an instance runs is the executor."""
