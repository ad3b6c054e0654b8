"""
Parses and checks manifests and pages from the blob store.

Anyone who can write to the store may have changed them, and manifests of old checkpoints have no
digest. So every field is checked, the result is bounded whatever the input, and entries must form a
tree: in order, each once, each in a directory that precedes it. Anything else raises
`CheckpointDamaged`.
"""

from __future__ import annotations

import json
import re
import zlib
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atoll.errors import CheckpointDamaged, PermanentError
from atoll.model.manifest import (
    DIRECTORY,
    FILE,
    MAX_FILE_SIZE,
    MAX_OBJECT,
    MAX_PAGE,
    MAX_PARTS,
    PAGE_ENTRIES,
    VERSION,
    Entry,
    Manifest,
    Part,
    parse_entry,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

DAMAGED = "checkpoint_damaged"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FAULTS = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError,
    zlib.error,
)  # fmt: skip
"""Raised by the code below for invalid JSON and fields of other types."""


@contextmanager
def _damage(what: str) -> Iterator[None]:
    try:
        yield
    except _FAULTS as error:
        raise CheckpointDamaged(
            f"{what} of a checkpoint is damaged in the blob store: {str(error)[:200]}.",
        ) from None


def read_manifest(data: bytes, session_id: str) -> Manifest:
    """The manifest of a checkpoint of that session."""
    with _damage("The list"):
        fields = json.loads(data)
        if fields.pop("version") != VERSION:
            raise PermanentError(
                "The checkpoint was written by another version of Atoll.",
                code="checkpoint_unreadable",
            )
        fields.pop("dropped", None)  # Written by earlier versions.
        fields["pages"] = tuple((_text(first), _name(name)) for first, name in fields["pages"])
        fields["objects"] = {
            _name(name): (_number(used), _number(size, MAX_OBJECT))
            for name, (used, size) in fields["objects"].items()
        }
        manifest = Manifest(**fields)
        if manifest.session_id != session_id:
            raise ValueError("it belongs to another session")
        for number in (manifest.number, manifest.files, manifest.size):
            _number(number)
        flags = (manifest.cut, manifest.settled, manifest.moment)
        if not all(type(flag) is bool for flag in flags) or type(manifest.created_at) is not str:
            raise TypeError("a field has the wrong type")
        return manifest


def read_page(data: bytes) -> list[Entry]:
    """The entries of a page, in order."""
    with _damage("A page"):
        inflater = zlib.decompressobj()
        text = inflater.decompress(data, MAX_PAGE)
        if not inflater.eof or inflater.unconsumed_tail:
            raise ValueError(f"it is cut off, or has more than {MAX_PAGE} bytes")
        lines = text.split(b"\n", PAGE_ENTRIES)
        if len(lines) > PAGE_ENTRIES:
            raise ValueError(f"it has more than {PAGE_ENTRIES} entries")
        return [_entry(json.loads(line)) for line in lines]


def _entry(fields: Any) -> Entry:
    *known, parts = fields
    if len(known) != 8:
        raise ValueError("an entry has the wrong number of fields")
    entry = parse_entry(known)
    if type(parts) is not list or len(parts) > MAX_PARTS or (parts and entry.kind != FILE):
        raise ValueError("an entry has too many parts, or is not a file and has parts")
    placed = tuple(_part(*part) for part in parts)
    if sum(part.length for part in placed) > entry.size:
        raise ValueError("a file has more parts than bytes")
    return replace(entry, parts=placed)


def _part(name: Any, offset: Any, length: Any) -> Part:
    most = MAX_FILE_SIZE if name is None else MAX_OBJECT
    if not _number(length, most) or _number(offset, most) + length > most:
        raise ValueError("a part is not in its object")
    return Part(None if name is None else _name(name), offset, length)


def _name(value: Any) -> str:
    if type(value) is not str or _DIGEST.fullmatch(value) is None:
        raise ValueError("an object is not named by its digest")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("a path is not text")
    return value


def _number(value: Any, most: int | None = None) -> int:
    if type(value) is not int or value < 0 or (most is not None and value > most):
        raise ValueError("not a number of bytes or files")
    return value


class TreeOrder:
    """
    Checks that entries, page after page, form a tree. Otherwise the executor would find duplicate
    names, or files below a link, in the middle of a restore.
    """

    def __init__(self) -> None:
        self._last: list[str] = []
        self._directory: list[str] = []
        """The directory of the last entry, or the entry itself if it is one."""

    def check(self, entry: Entry) -> None:
        order = entry.order
        parent = order[:-1]
        with _damage("A page"):
            if order <= self._last:
                raise ValueError(f"{entry.path!r} is not in order")
            if self._directory[: len(parent)] != parent:
                raise ValueError(f"{entry.path!r} is in no directory")
        self._last = order
        self._directory = order if entry.kind == DIRECTORY else parent
