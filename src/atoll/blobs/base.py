"""
The contract for large data that is not looked into: bytes by key.

An object is there whole or not at all. `put` replaces what had the key; a reader meanwhile gets all
of the old or all of the new, and so does everybody after the process was killed in the middle of a
`put`. What such a kill leaves behind is never read, never in the way of a later `put`, and goes
with `remove_all`. When `put` returns, the object outlives this process; a power cut may take the
last ones where the back-end does not wait for the disk, so a reader who must know checks what it
reads. A cancelled call may have been done or not.

Objects are given and taken whole: megabytes, not gigabytes.

Keys are ours, never a user's: one or more names of `A-Z a-z 0-9 . _ -`, joined by `/`, none of them
`.` or `..`, at most 512 characters. Any other key is a mistake in the program, a `ValueError`. No
key may be the directory of another.

A back-end that cannot be reached, is full or refuses raises `TemporaryError` with code
`blobs_unavailable`; the object is then as it was or as it was to be, and the call may be repeated.
Every method may be called from many tasks at once, with the same key too, and does its blocking
work beside the event loop.
"""

from __future__ import annotations

import re
from typing import Protocol

_KEY = re.compile(r"(?!.*(^|/)\.\.?(/|$))[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_LONGEST = 512


class Blobs(Protocol):
    async def put(self, key: str, data: bytes) -> None: ...

    async def get(self, key: str, *, start: int = 0, end: int | None = None) -> bytes | None:
        """
        The object, or its bytes from `start` up to but not including `end` as far as there are any;
        None when no object has the key.
        """

    async def remove(self, key: str) -> None:
        """Nothing happens when it is not there."""

    async def remove_all(self, prefix: str) -> None:
        """
        Remove all whose key begins with `prefix`, which is a key followed by `/`, and what killed
        puts left there. A failure may leave some; calling it again goes on. A put beneath the
        prefix at the same time may be unavailable.
        """


def check_key(key: str) -> str:
    if len(key) > _LONGEST or _KEY.fullmatch(key) is None:
        raise ValueError(f"not a key of a blob: {key!r}")
    return key


def check_prefix(prefix: str) -> str:
    """The directory that a prefix names, without the slash."""
    if not prefix.endswith("/"):
        raise ValueError(f"not a prefix of keys of blobs: {prefix!r}")
    return check_key(prefix[:-1])
