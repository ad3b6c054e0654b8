"""
The contract for blobs: large opaque data, by key.

Writes are atomic. `put` and `write` replace the object of that key; a concurrent reader gets the
complete old or the complete new object, and so does every reader after a kill in the middle. What
such a kill leaves behind is never read and never blocks a later call; on disk `remove_all` removes
it, on S3 the bucket's lifecycle rule for unfinished uploads. When a call returns, the object
survives this process; where the back-end does not sync to disk, a power cut may lose the last ones,
so a reader that must be sure verifies what it reads. A cancelled call may have been executed or
not, but a `write` that was cancelled before its last chunk was not.

`put`, `create` and `get` hold objects in memory: megabytes, not gigabytes. `write` and `open`
stream objects of up to `MAX_OBJECT_SIZE` bytes and hold a few chunks of `CHUNK_SIZE` at a time.

Keys come from Atoll, never from users: one or more names of `A-Z a-z 0-9 . _ -`, joined by `/`,
none of them `.` or `..`, at most 512 characters. Any other key is a bug and raises `ValueError`. No
key may be the directory of another. An object with any other name was not written by Atoll: it is
not listed, and only `remove_all` removes it.

A back-end that cannot be reached, is full or refuses raises `BlobsUnavailable`; the object is then
unchanged or written, and the call may be repeated. No message contains credentials or signatures.
Every method may be called from many tasks at once, with the same key too, and never blocks the
event loop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from atoll.errors import BlobsUnavailable, PermanentError, TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import datetime, timedelta

CHUNK_SIZE = 4 * 1024 * 1024
"""Largest chunk in bytes that `open` yields."""
PART_SIZE = 8 * 1024 * 1024
"""Bytes that `write` sends at a time; an object that is not larger is sent in one request."""
MAX_OBJECT_SIZE = 10_000 * PART_SIZE
"""S3 accepts 10 000 parts. A larger object is refused with `TooLarge`, code `blob_too_large`."""
MAX_GET = 256 * 1024 * 1024
"""Bytes of the largest object that `get` reads, unless its caller allows fewer."""
PAGE_SIZE = 1000
"""Objects in one page of a list at most."""
MAX_LINK_SECONDS = 7 * 24 * 3600
"""Longest validity in seconds of a signed URL on S3."""

_KEY = re.compile(r"(?!.*(^|/)\.\.?(/|$))[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_LONGEST = 512

Method = Literal["GET", "PUT"]


class RefusedByStore(BlobsUnavailable):
    """The back-end answered and refused: no permission, no space, no bucket."""


class UnlistableNames(TemporaryError):
    """
    Objects have names that cannot be listed, such as those with control characters. Atoll uses no
    such names, but code in a mounted workspace or volume can.
    """

    code = "blobs_unlistable"


class OversizedBlob(PermanentError):
    """An object is larger than what Atoll can have written."""

    code = "blob_damaged"


@dataclass(frozen=True, slots=True)
class BlobInfo:
    key: str
    size: int
    """Bytes."""
    etag: str
    """
    Changes when the object is replaced; opaque. It may also change with the same content, such as
    when an object moves from the spool to the store.
    """
    modified_at: datetime
    """When it was written, by the back-end's clock, precise to a second or better."""


class OpenBlob(NamedTuple):
    info: BlobInfo
    chunks: AsyncIterator[bytes]
    """
    The requested bytes; no chunk is empty. Iteration may stop at any chunk.
    """


class Blobs(Protocol):
    async def put(self, key: str, data: bytes) -> None: ...

    async def create(self, key: str, data: bytes) -> bool:
        """
        Put it unless the key exists; false if it does, and nothing is written. Of several
        concurrent calls one returns true. After a failed call, false may mean the object of that
        call.
        """

    async def write(self, key: str, chunks: AsyncIterator[bytes]) -> int:
        """
        Put the concatenated chunks, of any size each, and return their total size. If the iterator
        raises, so does this, and nothing is written. Callers bound how many run at once: a call
        that waits for its chunks delays no other.
        """

    async def get(
        self, key: str, *, start: int = 0, end: int | None = None, limit: int = MAX_GET
    ) -> bytes | None:
        """
        The object, or its bytes from `start` up to but not including `end`, as far as it has any;
        None if the key does not exist. If that is more than `limit` bytes, nothing is read and
        `OversizedBlob` is raised: other programs may have written to the back-end.
        """

    async def head(self, key: str) -> BlobInfo | None:
        """The object's metadata; None if the key does not exist."""

    async def open(self, key: str, *, start: int = 0, end: int | None = None) -> OpenBlob | None:
        """
        Stream the object, with the same range as `get`; None if the key does not exist. All chunks
        are of the object that `info` describes. If it is replaced or removed before the last chunk
        was read, the rest still arrives, or `TemporaryError` with code `blob_changed` is raised.
        """

    async def list(
        self, prefix: str, *, after: str | None = None, limit: int = PAGE_SIZE
    ) -> list[BlobInfo]:
        """
        The first `limit` objects (1 to `PAGE_SIZE`) whose key begins with `prefix` (a key followed
        by `/`) and comes after the key `after`, in the order of their keys' bytes. Fewer than
        `limit` means that there are no more. An object written or removed meanwhile may be listed
        or not; every other object is listed once. Back-ends sort "a/…" and "a-b/…" differently, so
        beneath a prefix that is listed no name may begin with another name there.
        """

    async def remove(self, key: str, *, deferrable: bool = True) -> None:
        """
        Does nothing if the key does not exist. If it is not `deferrable` and the back-end cannot be
        reached, it raises and the object is not removed later.
        """

    async def remove_all(self, prefix: str, *, deferrable: bool = True) -> None:
        """
        Remove all objects whose key begins with `prefix`, which is a key followed by `/`, and, on
        disk, the remains of interrupted puts. After a failure some may remain; call it again. A
        concurrent put beneath the prefix may fail. `deferrable` is that of `remove`.
        """

    async def is_synced(self, prefix: str) -> bool:
        """
        Whether the back-end has every put and removal beneath `prefix` from this node, so that none
        of them waits in the spool.
        """

    async def presign(self, method: Method, key: str, expires: timedelta) -> str | None:
        """
        A URL of the back-end that allows any client to get, or put, this one object until it
        expires (after 1 second to 7 days, otherwise `ValueError`). None if the back-end has no
        such URLs: then the data must go through Atoll. The URL is a secret and must not be logged.
        An object put through it may have any size, and is encrypted as the bucket prescribes.
        """


def is_key(name: str) -> bool:
    return len(name) <= _LONGEST and _KEY.fullmatch(name) is not None


def check_key(key: str) -> str:
    if not is_key(key):
        raise ValueError(f"not a key of a blob: {key!r}")
    return key


def check_size(key: str, size: int, limit: int) -> None:
    if size > limit:
        raise OversizedBlob(
            f"The blob {key} has {size} bytes, but Atoll writes at most {limit}. Another program "
            "changed it in the blob store."
        )


def check_prefix(prefix: str) -> str:
    """The directory that a prefix names, without the trailing slash."""
    if not prefix.endswith("/"):
        raise ValueError(f"not a prefix of keys of blobs: {prefix!r}")
    return check_key(prefix[:-1])


def check_page(prefix: str, after: str | None, limit: int) -> str:
    """The directory to list."""
    if after is not None:
        check_key(after)
    if not 1 <= limit <= PAGE_SIZE:
        raise ValueError(f"not a page of a list of blobs: {limit}")
    return check_prefix(prefix)


def check_expiry(expires: timedelta) -> timedelta:
    if not 1 <= expires.total_seconds() <= MAX_LINK_SECONDS:
        raise ValueError(f"a link to a blob cannot last for {expires}")
    return expires
