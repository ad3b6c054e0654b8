"""Names of images, and what is recorded about an image."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

HUB = "docker.io"
"""The registry of names without one."""

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_SERVER = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?"
_REFERENCE = re.compile(
    rf"(?P<name>(?:(?P<server>{_SERVER})/)?{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
SERVER = r"^[A-Za-z0-9\[][A-Za-z0-9.:\]-]{0,254}$"
"""The address of a registry: host and port."""
LONGEST = 512


@dataclass(frozen=True, slots=True)
class Reference:
    """`name:tag`, `name@digest` or `name:tag@digest`; the digest takes precedence."""

    name: str
    server: str
    tag: str
    """Empty if there is only a digest."""
    digest: str = ""

    @property
    def wanted(self) -> str:
        """What to pull from the repository `name`."""
        return self.digest or self.tag

    def pinned(self, digest: str) -> str:
        return f"{self.name}@{digest}"


def parse(text: str) -> Reference:
    """Raises `ValueError` if the text is not the name of an image."""
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
    """Encrypted, bound to this template and this server."""


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """The image that a version of a template was built into."""

    digest: str | None = None
    """The digest of its manifest if it came from a registry; other nodes pull it by this."""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    """The image's own; instances run the executor instead."""
