"""
Images for the engines of tests, made from programs of this machine: no registry can be reached.

One image has Python, the other has not; both have bash and the usual tools.
"""

from __future__ import annotations

import fcntl
import shutil
import tarfile
from pathlib import Path
from typing import NamedTuple

from tests.rootfs import build_image
from tests.servers.docker import Dockerd

PYTHON, SHELL = "atoll-test/python:1", "atoll-test/shell:1"
CHANGES = ("ENV PATH=/usr/local/bin:/usr/bin:/bin", 'CMD ["bash"]')


class Archives(NamedTuple):
    """Root file systems as tar files."""

    python: Path
    shell: Path

    def load(self, engine: Dockerd) -> Dockerd:
        engine.import_image(self.python, PYTHON, *CHANGES)
        engine.import_image(self.shell, SHELL, *CHANGES)
        return engine


def make_archives(directory: Path) -> Archives:
    """Made once per directory; the first of several processes makes them."""
    made = Archives(directory / "python.tar", directory / "shell.tar")
    with (directory / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for archive in made:
            if not archive.exists():
                _make(archive, python=archive is made.python)
    return made


def _make(archive: Path, *, python: bool) -> None:
    place = build_image(archive.with_suffix(""), python=python)
    part = archive.with_suffix(".part")
    with tarfile.open(part, "w") as packed:
        packed.add(place, ".")
    part.rename(archive)
    shutil.rmtree(place)
