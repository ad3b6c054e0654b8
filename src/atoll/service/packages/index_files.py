"""
Files to which pages of the package index have linked, for one installation.

A page is parsed by `index_page`, in a process of its own with resource limits. The total size of
its results for one installation is limited here.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field

from atoll.service.packages import index_page

READ_SECONDS = 60.0
"""Time limit for one page, also on a busy machine: CPU time has a limit of its own."""
MAX_BYTES = 64 * 1024 * 1024
"""Of all links of an installation, as `index_page` writes them."""


class UnreadablePage(Exception):
    """A malformed page, or one that exceeds the limits."""


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A file to which a page of the index links."""

    name: str
    url: str = field(repr=False)
    metadata: bool
    """Whether the index serves its metadata as a separate file."""
    hashes: dict[str, str]
    """Hexadecimal, by algorithm."""


class IndexFiles:
    def __init__(self) -> None:
        self._links: dict[str, IndexFile] = {}
        self._bytes = 0

    def get(self, token: str) -> IndexFile | None:
        return self._links.get(token)

    async def rewrite(self, name: str, content: bytes, kind: str, url: str) -> bytes:
        """The page with a token in place of each link. Raises `UnreadablePage`."""
        written = await _run(name, content, kind, url)
        return await asyncio.to_thread(self._keep, written)

    def _keep(self, written: bytes) -> bytes:
        count, _, rest = written.partition(b"\n")
        *listed, page = rest.split(b"\n", int(count))
        for line in listed:
            token, *about = json.loads(line)
            if token in self._links:
                continue
            self._bytes += len(line)
            if self._bytes > MAX_BYTES:
                raise UnreadablePage
            self._links[token] = IndexFile(*about)
        return page


async def _run(name: str, content: bytes, kind: str, url: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", index_page.__file__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd="/",
        env={},
    )  # fmt: skip
    try:
        async with asyncio.timeout(READ_SECONDS):
            request = json.dumps([name, kind, url]).encode()
            written, _ = await process.communicate(request + b"\n" + content)
    except TimeoutError:
        raise UnreadablePage from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise UnreadablePage
    return written
