"""
The files that a wheel installs, with their hashes, and its scripts.

Read from the wheel's RECORD and entry points, which are untrusted: paths are checked, and anything
that cannot be parsed is an error. Standard library alone; blocking file work.
"""

from __future__ import annotations

import configparser
import csv
import io
import re
import shlex
import zipfile
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DEPTH = 64
"""Levels of directories, each of which takes a descriptor; real packages have about twenty."""
MAX_RECORD = 64 * 1024 * 1024
"""Bytes of a wheel's RECORD, or of a script with a new interpreter line."""
MAX_SHEBANG = 120
"""Length of an interpreter line that every kernel supports."""
HASHES = ("sha256", "sha384", "sha512")
INFO = ".dist-info"
GENERATED = (
    "RECORD", "RECORD.jws", "RECORD.p7s", "INSTALLER", "REQUESTED", "direct_url.json",
    "uv_cache.json", "uv_build.json",
)  # fmt: skip
"""Files of a distribution that installers add, and signatures."""
POINT = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)((?:\.[A-Za-z_]\w*)*)\s*(?:\[.*\])?")
SCRIPT_NAME = re.compile(r"[\w.+-]*\w[\w.+-]*")
SCRIPT = """\
import sys
from {module} import {name}
if __name__ == "__main__":
    sys.exit({name}{rest}())
"""


class Rejected(Exception):
    """The installed files are not accepted; the message is for the user."""


@dataclass
class Distribution:
    """The files of a distribution, by their paths in the directory."""

    info: str
    """The name of its `.dist-info`."""
    digest: str = ""
    """Of the wheel; empty for one that was built."""
    files: dict[str, str] = field(default_factory=dict)
    """Hashes, as RECORD writes them."""
    scripts: dict[str, bytes] = field(default_factory=dict)
    """Content of those that are written here."""


def from_wheel(path: str, digest: str, python: str) -> Distribution | None:
    try:
        with zipfile.ZipFile(path) as archive:
            return _read_wheel(archive, digest, python)
    except (zipfile.BadZipFile, zlib.error, ValueError, RuntimeError, EOFError, OSError) as error:
        raise Rejected(f"A wheel cannot be read: {str(error)[:200]}") from error


def _read_wheel(archive: zipfile.ZipFile, digest: str, python: str) -> Distribution | None:
    """None if the wheel has no RECORD; then none of its files can be installed."""
    names = set(archive.namelist())
    records = [name for name in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)]
    if len(records) != 1:
        return None
    info = records[0].rpartition("/")[0]
    made = Distribution(info, digest)
    data = f"{info.removesuffix(INFO)}.data/"
    generated = {f"{info}/{name}" for name in GENERATED}
    for path, value in read_record(_entry(archive, records[0])):
        if path not in names or path in generated:
            continue
        if not path.startswith(data):
            made.files[path] = value
            continue
        kind, _, rest = path.removeprefix(data).partition("/")
        if kind == "scripts":
            script = _written_anew(archive, path, python)
            if script is not None:
                made.scripts[f"bin/{rest}"] = script
            else:
                made.files[f"bin/{rest}"] = value
        elif kind == "headers":
            made.files[f"include/{_normalised(info.partition('-')[0])}/{rest}"] = value
        elif kind in ("purelib", "platlib", "data"):
            made.files[rest] = value
        else:
            raise Rejected(f"{info}: a wheel has files for {kind[:50]!r}.")
    points = f"{info}/entry_points.txt"
    if points in names:
        made.scripts.update(entry_point_scripts(_entry(archive, points), python))
    return made


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _entry(archive: zipfile.ZipFile, name: str) -> bytes:
    with archive.open(name) as file:
        content = file.read(MAX_RECORD + 1)
    if len(content) > MAX_RECORD:
        raise Rejected(f"{name[:200]} of a wheel is too large.")
    return content


def read_record(content: bytes) -> Iterator[tuple[str, str]]:
    """Paths and hashes; those without a hash are not checked and so not listed."""
    try:
        lines = list(csv.reader(io.StringIO(content.decode()), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise Rejected("The RECORD of a wheel cannot be read.") from error
    for line in lines:
        if len(line) != 3:
            raise Rejected("The RECORD of a wheel cannot be read.")
        path, value = line[0], line[1]
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in path or len(parts) > MAX_DEPTH:
            raise Rejected(f"The RECORD of a wheel lists {path[:200]!r}.")
        if value.partition("=")[0] in HASHES:
            yield path, value


def _written_anew(archive: zipfile.ZipFile, path: str, python: str) -> bytes | None:
    """A script with a new first line, which names the interpreter of the environment."""
    with archive.open(path) as file:
        first = file.readline(200)
    if not first.startswith(b"#!python"):
        return None
    return _shebang(python) + _entry(archive, path).partition(b"\n")[2]


def _shebang(python: str) -> bytes:
    """The first lines of a script that this interpreter runs."""
    if len(python) <= MAX_SHEBANG and not re.search(r"\s", python):
        return f"#!{python}\n".encode()
    # To a shell the second line is a command, to Python it is a string.
    return f"#!/bin/sh\n'''exec' {shlex.quote(python)} \"$0\" \"$@\"\n' '''\n".encode()


def entry_point_scripts(content: bytes, python: str) -> dict[str, bytes]:
    parser = configparser.ConfigParser(delimiters=("=",), strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(content.decode())
    except (UnicodeDecodeError, configparser.Error) as error:
        raise Rejected("The entry points of a wheel cannot be read.") from error
    scripts = {}
    for section in ("console_scripts", "gui_scripts"):
        for name, value in parser.items(section) if parser.has_section(section) else ():
            found = POINT.fullmatch(value.strip())
            if found is None or SCRIPT_NAME.fullmatch(name) is None:
                raise Rejected(f"A wheel has the entry point {name[:100]!r}.")
            module, first, rest = found.groups()
            text = SCRIPT.format(module=module, name=first, rest=rest)
            scripts[f"bin/{name}"] = _shebang(python) + text.encode()
    return scripts
