"""
The contract for large data that is not looked into: bytes by key.

An object is there whole or not at all. `put` and `write` replace what had the key; a reader
meanwhile gets all of the old or all of the new, and so does everybody after the process was killed
in the middle. What such a kill leaves behind is never read and never in the way of a later call; on
disk it goes with `remove_all`, on S3 with the bucket's rule for unfinished uploads. When a call
returns, the object outlives this process; a power cut may take the last ones where the back-end
does not wait for the disk, so a reader who must know checks what it reads. A cancelled call may
have been done or not, but a `write` that was cancelled before its last chunk was not.

`put`, `create` and `get` give and take objects whole: megabytes, not gigabytes. `write` and `open`
move objects of up to `LARGEST` bytes in pieces, and hold a few pieces of `PIECE` bytes at a time.

Keys are ours, never a user's: one or more names of `A-Z a-z 0-9 . _ -`, joined by `/`, none of them
`.` or `..`, at most 512 characters. Any other key is a mistake in the program, a `ValueError`. No
key may be the directory of another. An object that somebody else gave another name is no blob: no
list has it, and only `remove_all` removes it.

A back-end that cannot be reached, is full or refuses raises `TemporaryError` with code
`blobs_unavailable`; the object is then as it was or as it was to be, and the call may be repeated.
No message has credentials or signatures in it. Every method may be called from many tasks at once,
with the same key too, and does its blocking work beside the event loop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from atoll.errors import BlobsUnavailable, PermanentError, TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import datetime, timedelta

PIECE = 4 * 1024 * 1024
"""Most bytes that `open` gives at a time."""
PART = 8 * 1024 * 1024
"""Bytes that `write` sends at a time; an object that is not larger is sent as a whole."""
LARGEST = 10_000 * PART
"""S3 takes so many parts. A larger object is refused with `TooLarge`, `blob_too_large`."""
MAX_GET = 256 * 1024 * 1024
"""Most bytes of an object that `get` takes into memory, unless its caller allows fewer."""
PAGE = 1000
"""Most objects in one page of a list."""
LONGEST_LINK = 7 * 24 * 3600
"""Seconds; S3 takes no signature that is to last longer."""

_KEY = re.compile(r"(?!.*(^|/)\.\.?(/|$))[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_LONGEST = 512

Method = Literal["GET", "PUT"]


class Refused(BlobsUnavailable):
    """`blobs_unavailable` of a back-end that is there and said no: no right, no room, no bucket."""


class UnlistableNames(TemporaryError):
    """
    Objects have names that cannot be read from a list, such as those with control characters. Atoll
    gives no such names, but code in a mounted workspace or volume can.
    """

    code = "blobs_unlistable"


class Oversized(PermanentError):
    """An object is larger than what was written there can be."""

    code = "blob_damaged"


@dataclass(frozen=True, slots=True)
class BlobInfo:
    key: str
    size: int
    """Bytes."""
    etag: str
    """
    Another one when the content was replaced; to be compared and nothing else. It may change
    without the content too, as when an object goes from one back-end to another.
    """
    modified_at: datetime
    """When it was written, by the back-end's clock, to the second at least."""


class Opened(NamedTuple):
    info: BlobInfo
    pieces: AsyncIterator[bytes]
    """
    The bytes that were asked for, none of the pieces empty. It may be left at any piece.
    """


class Blobs(Protocol):
    async def put(self, key: str, data: bytes) -> None: ...

    async def create(self, key: str, data: bytes) -> bool:
        """
        Put it if no object has the key. False when one has, and nothing was written. Of several at
        once one is True. After a call that failed, False may mean that call's own object.
        """

    async def write(self, key: str, chunks: AsyncIterator[bytes]) -> int:
        """
        Put what the chunks are together, of any size each, and tell how many bytes these were.
        What the iterator raises is raised from here, and then nothing was written. How many there
        are at once is for the callers to bound: one that waits for its chunks holds nobody up.
        """

    async def get(
        self, key: str, *, start: int = 0, end: int | None = None, limit: int = MAX_GET
    ) -> bytes | None:
        """
        The object, or its bytes from `start` up to but not including `end` as far as there are any;
        None when no object has the key. If these are more than `limit` bytes, none of them is read
        and `Oversized` is raised: whoever can write to the back-end decides how large an object is.
        """

    async def head(self, key: str) -> BlobInfo | None:
        """What is known of the object; None when no object has the key."""

    async def open(self, key: str, *, start: int = 0, end: int | None = None) -> Opened | None:
        """
        The object's bytes in pieces, with the same range as `get`; None when no object has the key.
        All are of the one object that `info` tells of. When it is replaced or removed before the
        last piece was read, the rest comes nevertheless or is a `TemporaryError`, `blob_changed`.
        """

    async def list(
        self, prefix: str, *, after: str | None = None, limit: int = PAGE
    ) -> list[BlobInfo]:
        """
        The first `limit` objects, 1 to `PAGE`, whose key begins with `prefix` (a key followed by
        `/`) and comes after the key `after`, in the order of their keys' bytes. Fewer than `limit`
        means that there are no more. What is written or removed meanwhile may be in it or not; all
        else is there once. Back-ends disagree over "a/…" and "a-b/…": beneath a prefix that is to
        be listed no name may begin with another name there.
        """

    async def remove(self, key: str, *, later: bool = True) -> None:
        """
        Nothing happens when it is not there. Unless it may be done `later`, a back-end that is away
        is unavailable, and the object is then not removed behind the caller's back.
        """

    async def remove_all(self, prefix: str, *, later: bool = True) -> None:
        """
        Remove all whose key begins with `prefix`, which is a key followed by `/`, and on disk what
        killed puts left there. A failure may leave some; calling it again goes on. A put beneath
        the prefix at the same time may be unavailable. `later` is that of `remove`.
        """

    async def is_home(self, prefix: str) -> bool:
        """
        Whether all that was put or removed beneath `prefix` from this node is so in the back-end:
        nothing of it waits here for one that is, or was, away.
        """

    async def presign(self, method: Method, key: str, expires: timedelta) -> str | None:
        """
        An address of the back-end's own by which whoever has it can get, or put, this one object
        until it expires (in 1 second to 7 days, else `ValueError`), without any other right. None
        when there is none: then it has to go through us. The address is a secret: it is not logged.
        What is put by it may be of any size, and is encrypted as the bucket itself says.
        """


def is_key(name: str) -> bool:
    return len(name) <= _LONGEST and _KEY.fullmatch(name) is not None


def check_key(key: str) -> str:
    if not is_key(key):
        raise ValueError(f"not a key of a blob: {key!r}")
    return key


def check_size(key: str, size: int, limit: int) -> None:
    if size > limit:
        raise Oversized(
            f"The blob {key} has {size} bytes, and {limit} at most were written. It was changed in "
            "the blob store."
        )


def check_prefix(prefix: str) -> str:
    """The directory that a prefix names, without the slash."""
    if not prefix.endswith("/"):
        raise ValueError(f"not a prefix of keys of blobs: {prefix!r}")
    return check_key(prefix[:-1])


def check_page(prefix: str, after: str | None, limit: int) -> str:
    """The directory that is to be listed."""
    if after is not None:
        check_key(after)
    if not 1 <= limit <= PAGE:
        raise ValueError(f"not a page of a list of blobs: {limit}")
    return check_prefix(prefix)


def check_expiry(expires: timedelta) -> timedelta:
    if not 1 <= expires.total_seconds() <= LONGEST_LINK:
        raise ValueError(f"a link to a blob cannot last for {expires}")
    return expires
