"""
The interpreter that runs Atoll, as a directory that works in any container of this machine's kind.

It brings its standard library, every shared library that it needs and the loader of these, and is
started through that loader: nothing of the image is used, whichever C library it has, or none.
Packages are left out, and so is what only a developer of Python needs.

`bin/python3` starts it for others, such as a program that runs `sys.executable`. It is a script of
the shell: in an image without /bin/sh it can be started by `COMMAND` alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from atoll.drivers.docker.errors import InterpreterMissing

PLACE = "/run/atoll/python"
"""Where it is bound inside."""
START_SECONDS = 120.0
"""Far more than it takes to compile the library."""
LEFT_OUT = (
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "idle_test",
    "tkinter", "turtledemo", "turtle.py", "_tkinter.*", "ensurepip", "lib2to3", "pydoc_data",
    "config-*", "*.a", "_test*.so", "_ctypes_test.*", "xxlimited*", "EXTERNALLY-MANAGED",
    "sitecustomize.py",
)  # fmt: skip
EXPECTED = (
    "libgcc_s.so.1", "libstdc++.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1",
    "libutil.so.1", "libm.so.6", "libresolv.so.2", "libnss_files.so.2",
)  # fmt: skip
"""What nothing here is linked with, but the C library loads at need, or wheels take as given."""

_LIBRARY = re.compile(r"^\s*(?:(\S+) => )?(/\S+) \(0x", re.MULTILINE)
_LOADER = re.compile(r"ld[-0-9.]")


def command(place: str = PLACE) -> tuple[str, ...]:
    """What it is started by, at a place; arguments follow."""
    return (*loaded(place), "--argv0", f"{place}/bin/python3", f"{place}/bin/python3.bin")


def loaded(place: str = PLACE) -> tuple[str, ...]:
    """What another program of this machine is started by, whose libraries are here too."""
    return (f"{place}/lib/ld.so", "--library-path", f"{place}/lib")


def is_linked(program: str) -> bool:
    """Whether a program needs `loaded`; false also where that cannot be told."""
    try:
        return bool(_linked(program, optional=True))
    except InterpreterMissing:
        return False


def write(directory: Path) -> Path:
    """
    The interpreter in `directory`, named by what it is made of. `PermanentError` with code
    `interpreter_missing` when this machine's cannot be carried away.
    """
    python = os.path.realpath(sys.executable)
    library = Path(sysconfig.get_path("stdlib"))
    binaries = {"bin/python3.bin": python, **_libraries(python, library)}
    path = directory / f"interpreter-{_tag(binaries, library)}"
    if path.exists():
        return path
    temporary = path.with_suffix(f".{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _fill(temporary, binaries, library)
        _try(temporary)
        _compile(temporary, library.name)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if not path.exists():
            raise
        # Another process was faster.
    return path


def _libraries(python: str, library: Path) -> dict[str, str]:
    """Files by the names that the loader looks for."""
    modules = sorted(str(path) for path in (library / "lib-dynload").glob("*.so"))
    ignored = shutil.ignore_patterns(*LEFT_OUT)
    left_out = ignored("", [os.path.basename(path) for path in modules])
    linked = _linked(python)
    needed = linked | _linked(
        *(path for path in modules if os.path.basename(path) not in left_out), optional=True
    )
    loaders = [path for name, path in linked.items() if _LOADER.match(name)]
    if not loaders:
        raise _missing(f"{python} is not linked with libraries that could be brought along")
    found = {f"lib/{name}": path for name, path in needed.items()}
    usual = {os.path.dirname(path) for name, path in linked.items() if name.startswith("libc.")}
    for directory in usual:
        for name in EXPECTED:
            if os.path.exists(f"{directory}/{name}"):
                found.setdefault(f"lib/{name}", f"{directory}/{name}")
    found["lib/ld.so"] = loaders[0]
    return found


def _linked(*files: str, optional: bool = False) -> dict[str, str]:
    """Libraries that the loader finds for them, by name."""
    if not files:
        return {}
    try:
        said = subprocess.run(
            ["ldd", *files], capture_output=True, text=True, check=False, timeout=START_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _missing(f"ldd, which tells what it needs, cannot be run ({error})") from error
    found = {}
    for name, path in _LIBRARY.findall(said.stdout):
        found[os.path.basename(name or path)] = path
    if not optional and not found:
        raise _missing(f"ldd tells nothing of {files[0]} ({said.stderr.strip()[-200:]})")
    return found


def _tag(binaries: dict[str, str], library: Path) -> str:
    made_of = [sys.version, str(library), Path(__file__).read_text()]
    for target, source in sorted({**binaries, "os.py": str(library / "os.py")}.items()):
        status = os.stat(source)
        made_of.append(f"{target} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]


def _fill(place: Path, binaries: dict[str, str], library: Path) -> None:
    for target, source in binaries.items():
        (place / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, place / target)
        (place / target).chmod(0o755)
    # Where the interpreter, which is told that it is bin/python3, looks for them.
    inside = place / sys.platlibdir / library.name
    shutil.copytree(
        library,
        inside,
        ignore=shutil.ignore_patterns(*LEFT_OUT),
        ignore_dangling_symlinks=True,
    )
    script = place / "bin/python3"
    words = " ".join((*loaded(), "--argv0", '"$0"', f"{PLACE}/bin/python3.bin"))
    script.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    script.chmod(0o755)
    for name in ("python", library.name):
        (place / "bin" / name).symlink_to("python3")


def _try(place: Path) -> None:
    """That it starts, with its own library."""
    done = _run(place, "-c", "import encodings, select, sys; print(sys.prefix)")
    if done.returncode != 0 or done.stdout.strip() != str(place):
        raise _missing(f"it does not start away from here ({done.stderr.strip()[-500:]})")


def _compile(place: Path, name: str) -> None:
    """In a process of its own: it takes seconds, of all of one."""
    files = str(place / sys.platlibdir / name)
    _run(
        place, "-m", "compileall", "-q", "-s", str(place), "-p", PLACE, "--invalidation-mode",
        "unchecked-hash", files,
    )  # fmt: skip
    for each in (place, *place.rglob("*")):
        if not each.is_symlink():
            # Whatever the umask was: the containers' user reads it.
            each.chmod(0o755 if each.is_dir() or each.stat().st_mode & 0o100 else 0o644)


def _run(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [*command(str(place)), "-I", "-S", *arguments]
    try:
        return subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=START_SECONDS, env={}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _missing(f"it does not start away from here ({error})") from error


def _missing(why: str) -> InterpreterMissing:
    return InterpreterMissing(
        "The image has no Python 3.8 or newer, and the interpreter that runs Atoll cannot be lent "
        f"to it: {why}. Take an image with Python, or name it in the template's `python`.",
    )
