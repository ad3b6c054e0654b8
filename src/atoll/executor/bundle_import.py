"""
Imports the modules of the executor's bundle by their offsets, faster than `zipimport`, which
searches the archive for each. It is the `__init__` of the bundle's package
(`drivers/shared/executor_bundle.py`), and serves the Python version that built the bundle; others
import by `zipimport` and compile the sources.
"""

from __future__ import annotations

import _frozen_importlib
import _frozen_importlib_external
import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Callable

INDEX = "index-%s" % _frozen_importlib_external.MAGIC_NUMBER.hex()
"""Member of the bundle: offset and size of each module's code, and whether it is a package."""


class BundleFinder:
    def __init__(self, archive: str, index: dict[str, tuple[int, int, bool]]) -> None:
        self._archive = archive
        self._index = index
        # Opened once: in gVisor that takes longer than loading a module.
        self._fd = os.open(archive, os.O_RDONLY | os.O_CLOEXEC)

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        found = self._index.get(name)
        if found is None:
            return None
        loader: Any = self
        spec = _frozen_importlib.ModuleSpec(name, loader, is_package=found[2])
        if found[2]:
            # For `zipimport`, when this finder is removed.
            spec.submodule_search_locations = ["%s/%s" % (self._archive, name.replace(".", "/"))]
        return spec

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        offset, size, _ = self._index[module.__name__]
        # The code is our own, on a read-only mount.
        exec(marshal.loads(os.pread(self._fd, size, offset)), module.__dict__)  # noqa: S102, S302

    def close(self) -> None:
        os.close(self._fd)


def install(archive: str, read: Callable[[str], bytes]) -> None:
    """Import from `archive` by its index, if this version of Python has built it."""
    try:
        index = marshal.loads(read("%s/%s" % (archive, INDEX)))  # noqa: S302 - As above.
    except OSError:
        return
    sys.meta_path.insert(0, BundleFinder(archive, index))


def remove() -> None:
    """Close the bundle; what is imported from it later is imported by `zipimport`."""
    for finder in list(sys.meta_path):
        # The class of another copy of this module: that of the bundle's package.
        if type(finder).__module__ == "atoll_executor":
            sys.meta_path.remove(finder)
            finder.close()  # type: ignore[attr-defined]


if __name__ == "atoll_executor":
    install(__loader__.archive, __loader__.get_data)  # type: ignore[name-defined]
