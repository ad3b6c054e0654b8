"""
Copies of the wheels that an installation downloads, exactly as the index sent them.

A copy is kept while the installation runs, out of its reach, and only if it is complete and matches
the hashes of the index. The driver compares installed files with these copies.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from atoll.drivers.base import Wheel

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from atoll.service.packages.index_files import IndexFile


class WheelDownloads:
    def __init__(self, place: Path) -> None:
        self._place = place
        self._number = 0
        self._wheels: dict[str, Wheel] = {}

    def wheels(self) -> list[Wheel]:
        return list(self._wheels.values())

    def begin(self, link: IndexFile) -> WheelDownload:
        self._number += 1
        return WheelDownload(self, link, self._place / f"{self._number}.whl")

    def keep(self, wheel: Wheel) -> None:
        old = self._wheels.setdefault(wheel.digest + wheel.name, wheel)
        if old is not wheel:
            wheel.path.unlink()


class WheelDownload:
    """One wheel that is being downloaded. Blocking: callers use a thread."""

    def __init__(self, downloads: WheelDownloads, link: IndexFile, path: Path) -> None:
        self._downloads = downloads
        self._link = link
        self._path = path
        self._file: BinaryIO | None = None
        known = hashlib.algorithms_guaranteed - {"shake_128", "shake_256"}
        algorithms = {"sha256", *(name for name in link.hashes if name in known)}
        self._hashes = {name: hashlib.new(name, usedforsecurity=False) for name in algorithms}

    def write(self, data: bytes) -> None:
        if self._file is None:
            self._file = self._path.open("xb")
        self._file.write(data)
        for each in self._hashes.values():
            each.update(data)

    def finish(self) -> bool:
        """Call at the end: keep the wheel if it matches its hashes; returns whether it does."""
        right = self._file is not None and all(
            each.hexdigest() == self._link.hashes.get(name, each.hexdigest())
            for name, each in self._hashes.items()
        )
        if self._file is not None:
            self._file.close()
            self._file = None
        if right:
            digest = self._hashes["sha256"].hexdigest()
            self._downloads.keep(Wheel(self._path, self._link.name, digest))
        else:
            self._path.unlink(missing_ok=True)
        return right

    def drop(self) -> None:
        """Discard an incomplete download."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._path.unlink(missing_ok=True)
