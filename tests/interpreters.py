"""An interpreter for templates, with the packages that the tests and benchmarks themselves have."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def own_interpreter() -> Iterator[Path]:
    """
    The running interpreter. A sandbox has its own /tmp, so an environment in /tmp is not visible in
    it: it is copied to the home directory with hard links.
    """
    if not Path(sys.prefix).is_relative_to("/tmp"):
        yield Path(sys.executable)
        return
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix=".atoll-test-") as directory:
        Path(directory).chmod(0o755)
        venv.create(directory, with_pip=False, symlinks=True)
        packages = next(Path(directory).glob("lib/python*/site-packages"))
        shutil.copytree(
            sysconfig.get_path("purelib"), packages, copy_function=_link, dirs_exist_ok=True
        )
        yield Path(directory, "bin", "python")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
