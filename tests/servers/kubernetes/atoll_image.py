"""
An image of Atoll for clusters, made of this checkout and the packages that it runs with here.

It has what an image of deploy/Dockerfile has, as far as it matters in a cluster: the interpreter,
`atoll` and its dependencies, compiled, `ldd`, and certificate authorities.
"""

from __future__ import annotations

import compileall
import fcntl
import shutil
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from py_compile import PycInvalidationMode

import certifi
from packaging.requirements import Requirement

from tests.rootfs import TOOLS, build_image, put_libraries
from tests.servers.kubernetes.images import PATH, pack

ATOLL = "localhost/atoll:test"
TOP = Path(__file__).resolve().parents[3]
UNUSED = frozenset({"uv"})
"""Dependencies that the driver for Kubernetes does not use, and that are large."""
PROGRAM = """#!/usr/local/bin/python3
from atoll.cli import main
main()
"""


def make_atoll_image(directory: Path) -> Path:
    """The archive of `ATOLL`, made once per directory."""
    archive = directory / "atoll.oci.tar"
    with (directory / "atoll.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            layer = directory / "atoll.layer"
            _pack_layer(directory / "atoll-root", layer)
            pack(archive, ATOLL, layer, Env=[PATH], Entrypoint=["atoll"], Cmd=["serve"])
            layer.unlink()
    return archive


def _pack_layer(root: Path, layer: Path) -> None:
    build_image(root, python=True, tools=(*TOOLS, "ldd"))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = root / "usr/local/lib" / version
    packages = library / "site-packages"
    for found in _closure("atoll"):
        _put_files(found, packages)
    shutil.copytree(
        TOP / "src/atoll", packages / "atoll", ignore=shutil.ignore_patterns("__pycache__")
    )
    for module in packages.rglob("*.so*"):
        put_libraries(root, str(module))
    program = root / "usr/local/bin/atoll"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    authorities = root / "etc/ssl/certs/ca-certificates.crt"
    authorities.parent.mkdir(parents=True)
    shutil.copy(certifi.where(), authorities)
    # Nobody can write what is compiled there later.
    compileall.compile_dir(
        library, quiet=2, workers=2, stripdir=str(root), prependdir="/",
        invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
    )  # fmt: skip
    with tarfile.open(layer, "w") as packed:
        packed.add(root, ".")
    shutil.rmtree(root)


def _closure(name: str) -> Iterator[Distribution]:
    """What a distribution needs, without itself."""
    waiting, seen = [Requirement(name)], {name, *UNUSED}
    while waiting:
        wanted = waiting.pop()
        found = distribution(wanted.name)
        if wanted.name != name:
            yield found
        for needed in map(Requirement, found.requires or ()):
            extras = wanted.extras or {""}
            applies = not needed.marker or any(needed.marker.evaluate({"extra": e}) for e in extras)
            if applies and _key(needed) not in seen:
                seen.add(_key(needed))
                waiting.append(needed)


def _key(requirement: Requirement) -> str:
    return requirement.name.lower().replace("_", "-")


def _put_files(found: Distribution, target: Path) -> None:
    for path in found.files or ():
        # Programs of packages are beside them.
        if ".." in path.parts or "__pycache__" in path.parts:
            continue
        copy = target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(str(path.locate()), copy)
