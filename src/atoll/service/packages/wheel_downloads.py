"""
The wheels that an installation was given, as the index sent them.

Each is kept beside the installation while it runs, out of its reach, and only when it came complete
and is what the index's hashes say: by these files the driver checks what was installed.
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
    """One wheel on its way. Blocking file work: callers use a thread."""

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

    def is_right(self) -> bool:
        """Called with all of it; whether it is what the index's hashes say. If so it is kept."""
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
        """What did not come complete."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._path.unlink(missing_ok=True)
