"""
The interpreter that runs Atoll, as a directory that works in any container of this architecture.

The directory contains the standard library, every shared library that the interpreter needs and
their dynamic loader, through which the interpreter is started. So it works in every image,
whichever C library the image has, if any. Packages and development files are left out.

`bin/python3` starts it for programs that run `sys.executable`. It is a shell script: in an image
without /bin/sh, only `command` can start the interpreter.

Started as a program, this module writes the interpreter into the directory that it is given.
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
from typing import TYPE_CHECKING

from atoll.errors import PermanentError

if TYPE_CHECKING:
    from collections.abc import Sequence

TARGET = "/run/atoll/python"
"""Where containers have it mounted."""
COMMAND_TIMEOUT = 120.0
"""Seconds for a subprocess; compiling the library takes far less."""
EXCLUDED = (
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "idle_test",
    "tkinter", "turtledemo", "turtle.py", "_tkinter.*", "ensurepip", "lib2to3", "pydoc_data",
    "config-*", "*.a", "_test*.so", "_ctypes_test.*", "xxlimited*", "EXTERNALLY-MANAGED",
    "sitecustomize.py",
)  # fmt: skip
EXTRA_LIBRARIES = (
    "libgcc_s.so.1", "libstdc++.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1",
    "libutil.so.1", "libm.so.6", "libresolv.so.2", "libnss_files.so.2",
)  # fmt: skip
"""Libraries that the C library loads on demand, or that wheels expect on every system."""


class InterpreterMissing(PermanentError):
    """The image has no Python, and none can be lent to it."""

    code = "interpreter_missing"


_LIBRARY = re.compile(r"^\s*(?:(\S+) => )?(/\S+) \(0x", re.MULTILINE)
_LOADER = re.compile(r"ld[-0-9.]")


def command(root: str = TARGET) -> tuple[str, ...]:
    """The command that starts the interpreter; arguments follow."""
    return (*loader(root), "--argv0", f"{root}/bin/python3", f"{root}/bin/python3.bin")


def loader(root: str = TARGET) -> tuple[str, ...]:
    """The start of a command that runs any program of this machine with the libraries here."""
    return (f"{root}/lib/ld.so", "--library-path", f"{root}/lib")


def is_dynamic(program: str) -> bool:
    """Whether a program is linked with shared libraries; false also if ldd cannot be run."""
    try:
        return bool(_linked(program, optional=True))
    except InterpreterMissing:
        return False


def write(directory: Path) -> Path:
    """
    Write the interpreter into `directory`, named by its content. Raises `InterpreterMissing` if the
    interpreter of this machine cannot be moved.
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
        _copy(temporary, binaries, library)
        _check(temporary)
        _compile(temporary, library.name)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if not path.exists():
            raise
        # Another process was faster.
    return path


def write_into(directory: Path) -> None:
    """
    Write the interpreter into an existing, empty directory, such as a volume. The library is as
    compiled as it is here: to compile it takes longer than one instance would save.
    """
    python = os.path.realpath(sys.executable)
    library = Path(sysconfig.get_path("stdlib"))
    binaries = {"bin/python3.bin": python, **_libraries(python, library)}
    _copy(directory, binaries, library, compiled=True)
    _check(directory)


def _libraries(python: str, library: Path) -> dict[str, str]:
    """Source files by their paths in the directory, with the names that the loader looks for."""
    modules = sorted(str(path) for path in (library / "lib-dynload").glob("*.so"))
    excluded = shutil.ignore_patterns(*EXCLUDED)("", [os.path.basename(path) for path in modules])
    linked = _linked(python)
    needed = linked | _linked(
        *(path for path in modules if os.path.basename(path) not in excluded), optional=True
    )
    loaders = [path for name, path in linked.items() if _LOADER.match(name)]
    if not loaders:
        raise _missing(f"{python} is not linked with shared libraries that could be copied")
    found = {f"lib/{name}": path for name, path in needed.items()}
    directories = {os.path.dirname(path) for name, path in linked.items() if name[:5] == "libc."}
    for directory in directories:
        for name in EXTRA_LIBRARIES:
            if os.path.exists(f"{directory}/{name}"):
                found.setdefault(f"lib/{name}", f"{directory}/{name}")
    found["lib/ld.so"] = loaders[0]
    return found


def _linked(*files: str, optional: bool = False) -> dict[str, str]:
    """Paths of the shared libraries that the loader finds for these files, by name."""
    if not files:
        return {}
    try:
        ldd = subprocess.run(
            ["ldd", *files], capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _missing(f"cannot run ldd to list its libraries ({error})") from error
    found = {}
    for name, path in _LIBRARY.findall(ldd.stdout):
        found[os.path.basename(name or path)] = path
    if not optional and not found:
        raise _missing(f"ldd lists no libraries of {files[0]} ({ldd.stderr.strip()[-200:]})")
    return found


def _tag(binaries: dict[str, str], library: Path) -> str:
    content = [sys.version, str(library), Path(__file__).read_text()]
    for target, source in sorted({**binaries, "os.py": str(library / "os.py")}.items()):
        status = os.stat(source)
        content.append(f"{target} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]


def _copy(root: Path, binaries: dict[str, str], library: Path, *, compiled: bool = False) -> None:
    excluded = [name for name in EXCLUDED if not (compiled and name == "__pycache__")]
    for target, source in binaries.items():
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, root / target)
        (root / target).chmod(0o755)
    # The interpreter searches there, relative to its argv[0], which is bin/python3.
    shutil.copytree(
        library,
        root / sys.platlibdir / library.name,
        ignore=shutil.ignore_patterns(*excluded),
        ignore_dangling_symlinks=True,
    )
    script = root / "bin/python3"
    command_line = " ".join((*loader(), "--argv0", '"$0"', f"{TARGET}/bin/python3.bin"))
    script.write_text(f'#!/bin/sh\nexec {command_line} "$@"\n')
    script.chmod(0o755)
    for name in ("python", library.name):
        (root / "bin" / name).symlink_to("python3")


def _check(root: Path) -> None:
    """Check that it starts with its own standard library."""
    done = _run(root, "-c", "import encodings, select, sys; print(sys.prefix)")
    if done.returncode != 0 or done.stdout.strip() != str(root):
        raise _missing(f"a copy of it does not start ({done.stderr.strip()[-500:]})")


def _compile(root: Path, name: str) -> None:
    """Compile the library, in a process of its own: that takes seconds of CPU time."""
    files = str(root / sys.platlibdir / name)
    _run(
        root, "-m", "compileall", "-q", "-s", str(root), "-p", TARGET, "--invalidation-mode",
        "unchecked-hash", files,
    )  # fmt: skip
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            # Other users read it in containers, whatever the umask is.
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def _run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [*command(str(root)), "-I", "-S", *arguments]
    try:
        return subprocess.run(
            line, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT, env={}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _missing(f"a copy of it does not start ({error})") from error


def _missing(reason: str) -> InterpreterMissing:
    return InterpreterMissing(
        "The image has no Python 3.8 or newer, and the interpreter that runs Atoll cannot be "
        f"mounted into its containers: {reason}. Use an image with Python, or name its interpreter "
        "in the template's `python`."
    )


def main(arguments: Sequence[str]) -> None:
    try:
        write_into(Path(arguments[0]))
    except (InterpreterMissing, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
