"""
Volumes on this node's disk.

With images, a volume is a file system of its size in which every session can read and write,
because sessions have different uids. Without images, it is a directory that the node's owner fills
and sessions read. Blocking file work; callers use a thread.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

from atoll.drivers.shared import mount_syscalls
from atoll.drivers.shared.disk_images import MIN_IMAGE, make_file_system
from atoll.drivers.shared.file_trees import remove_tree
from atoll.drivers.shared.mount_points import unmount

if TYPE_CHECKING:
    from pathlib import Path

_USER, _GROUP, _OTHER, _ALL, _NOBODY = 0x01, 0x04, 0x20, 7, 0xFFFF_FFFF
SHARED = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, _ALL, _NOBODY) for tag in (_USER, _GROUP, _OTHER)
)
"""A default ACL: files in the directory get all rights that their maker gives them."""


class VolumeDisks:
    def __init__(self, root: Path, *, images: bool) -> None:
        self._root = root
        self._images = images

    def open(self) -> None:
        self._root.mkdir(mode=0o700, exist_ok=True)

    def image(self, name: str) -> Path | None:
        """The image to mount; None if the volume is a directory."""
        path = self._root / name / "disk"
        return path if path.exists() else None

    def directory(self, name: str) -> Path:
        return self._root / name / "files"

    def make(self, name: str, size: int) -> None:
        """Make an empty volume; remove what is left of an earlier one."""
        directory = self._root / name
        self.remove(name)
        directory.mkdir(mode=0o700)
        if not self._images:
            self.directory(name).mkdir(mode=0o755)
            return
        new = directory / "new"
        make_file_system(new, max(size, MIN_IMAGE))
        self._share(new, directory / "top")
        new.rename(directory / "disk")

    @staticmethod
    def _share(image: Path, top: Path) -> None:
        """Let every uid write to an image that no tenant has written to yet."""
        top.mkdir()
        mount_syscalls.mount_image(str(image), str(top))
        try:
            (top / "lost+found").rmdir()
            top.chmod(0o777)
            os.setxattr(top, "system.posix_acl_default", SHARED)
        finally:
            unmount(top)
        top.rmdir()

    def remove(self, name: str) -> None:
        # A process that was killed in `make` may have left it mounted.
        unmount(self._root / name / "top")
        remove_tree(self._root / name)
