"""Small root file systems made of this machine's programs, with the libraries that they need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

TOOLS = (
    "base64", "basename", "bash", "cat", "chmod", "cmp", "cp", "cut", "date", "dd", "df", "diff",
    "dirname", "du", "echo", "env", "expr", "false", "find", "grep", "gzip", "head", "hostname",
    "id", "kill", "ln", "ls", "mkdir", "mkfifo", "mktemp", "mv", "nohup", "nproc", "od", "printf",
    "ps", "pwd", "readlink", "realpath", "rm", "rmdir", "sed", "seq", "setsid", "sha256sum",
    "sleep", "sort", "stat", "stty", "tac", "tail", "tar", "tee", "test", "timeout", "touch", "tr",
    "true", "truncate", "tty", "uname", "uniq", "wc", "whoami", "xargs", "yes",
)  # fmt: skip
IMAGE_USER = "somebody"
MERGED = ("bin", "sbin", "lib", "lib64")
LIBRARIES = ("/lib", "/usr/lib")
LOCALE = Path("/usr/lib/locale/C.utf8")
"""Of a C library that has not got it built in."""
_LIBRARY = re.compile(r"(/[^ ]+) \(0x")


def merge(place: Path) -> None:
    """/bin, /lib and their like lead to /usr."""
    for name in MERGED:
        (place / "usr" / name).mkdir(parents=True)
        (place / name).symlink_to(f"usr/{name}")


def put(place: Path, source: str, target: str | None = None) -> None:
    """A program or library, at its own path or at `target`, and the libraries that it needs."""
    copy = place / (target or source).lstrip("/")
    if copy.exists():
        return
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(os.path.realpath(source), copy)
    copy.chmod(0o755)
    put_libraries(place, source)


def put_libraries(place: Path, source: str) -> None:
    output = subprocess.run(["ldd", source], capture_output=True, text=True, check=False)
    for library in _LIBRARY.findall(output.stdout):
        # Where the loader finds it without configuration, wherever it is on this machine.
        usual = library.startswith(LIBRARIES)
        put(place, library, None if usual else f"/usr/lib/{Path(library).name}")


def put_python(place: Path) -> None:
    """The interpreter that runs the tests, with its standard library, below /usr/local."""
    put(place, sys.executable, "/usr/local/bin/python3")
    library = sysconfig.get_path("stdlib")
    for module in Path(library, "lib-dynload").glob("*.so"):
        put_libraries(place, str(module))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(
        library,
        place / "usr/local/lib" / version,
        ignore=shutil.ignore_patterns(
            "site-packages", "test", "tests", "__pycache__", "idlelib", "ensurepip", "tkinter",
            "lib2to3", "config-*", "turtledemo", "distutils", "pydoc_data", "unittest",
        ),
    )  # fmt: skip


def build_rootfs(place: Path) -> Path:
    """An interpreter and nothing else."""
    merge(place)
    put_python(place)
    (place / "etc").mkdir()
    (place / "etc/mark").write_text("from the image")
    return place


def build_image(place: Path, *, python: bool, tools: Iterable[str] = TOOLS) -> Path:
    """What an image of a distribution has: a shell, the usual tools, root and one user."""
    merge(place)
    for name in tools:
        found = shutil.which(name, path="/usr/bin:/bin")
        assert found is not None, f"{name} is not installed"
        put(place, found, f"/usr/bin/{name}")
    (place / "usr/bin/sh").symlink_to("bash")
    if LOCALE.exists():
        shutil.copytree(LOCALE, place / LOCALE.relative_to("/"))
    if python:
        put_python(place)
    for name in ("dev", "etc", "home", "proc", "root", "run", "sys", "tmp", "var/tmp"):
        (place / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (place / name).chmod(0o1777)
    (place / "etc/passwd").write_text(
        f"root:x:0:0::/root:/bin/bash\n{IMAGE_USER}:x:1000:1000::/home:/bin/bash\n"
    )
    (place / "etc/group").write_text(f"root:x:0:\n{IMAGE_USER}:x:1000:\n")
    (place / "etc/mark").write_text("from the image")
    return place
