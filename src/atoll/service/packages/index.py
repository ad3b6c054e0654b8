"""
Finds the package index: the one in the settings, else the one that pip on this machine uses.

pip itself is asked, because only pip knows all places of its configuration, and its default. The
URL may contain a password and must not be shown.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from atoll.drivers.shared.url_origin import origin
from atoll.errors import InvalidRequest
from atoll.service.packages.index_page import JSON_PAGE

if TYPE_CHECKING:
    from atoll.settings import PackageSettings

ASK_SECONDS = 30.0
ACCEPT = f"{JSON_PAGE}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL")
"""Variables of uv that name an index; pip's own are read by pip."""

# The options with which pip would install: from files, environment and defaults.
_ASK_PIP = """
import json
from pip._internal.commands import create_command
options, _ = create_command("install").parser.parse_args([])
print(json.dumps({"url": options.index_url, "none": options.no_index, "ca_file": options.cert}))
"""


@dataclass(frozen=True)
class Index:
    url: str = field(repr=False)
    """Without user, password and trailing slash."""
    auth: tuple[str, str] | None = field(default=None, repr=False)
    ca_file: str | None = None

    def page(self, name: str) -> str:
        return f"{self.url}/{name}/"

    def auth_for(self, url: str) -> tuple[str, str] | None:
        """Credentials are sent to the index alone, not to the hosts of its links."""
        return self.auth if origin(url) == origin(self.url) else None

    def tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca_file)


def index_at(url: str, ca_file: str | None) -> Index:
    parts = urlsplit(url)
    auth = None
    if parts.username is not None:
        auth = unquote(parts.username), unquote(parts.password or "")
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")
    return Index(urlunsplit(bare).rstrip("/"), auth, ca_file)


async def find_index(settings: PackageSettings) -> Index:
    ca_file = None if settings.ca_file is None else str(settings.ca_file)
    if settings.index_url is not None:
        return index_at(settings.index_url, ca_file)
    for name in VARIABLES:
        if os.environ.get(name):
            return index_at(os.environ[name].rpartition("=")[2], ca_file)
    for python in (sys.executable, shutil.which("python3")):
        if python is not None and (options := await _ask(python)) is not None:
            if options["none"]:
                break
            return index_at(options["url"], ca_file or options["ca_file"])
    raise InvalidRequest(
        "dependencies: no package index is configured. Set ATOLL_PACKAGES__INDEX_URL.",
        code="packages_not_configured",
        field="dependencies",
    )


async def _ask(python: str) -> dict[str, Any] | None:
    """What pip of this interpreter uses; null if it has no pip."""
    process = await asyncio.create_subprocess_exec(
        python, "-c", _ASK_PIP,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd="/",
    )  # fmt: skip
    try:
        async with asyncio.timeout(ASK_SECONDS):
            printed, _ = await process.communicate()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        options = json.loads(printed)
        return options if process.returncode == 0 and isinstance(options["url"], str) else None
    except (ValueError, KeyError, TypeError):
        return None
