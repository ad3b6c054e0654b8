"""
The process that takes what an installation made, and keeps what it should have made.

What is installed was put down by the template's image, which may be hostile, and by code of
packages, where source builds are allowed. So nothing of it is believed: a wheel that came from the
index lists its files with their hashes (RECORD), and just these are copied, when they are what it
says; scripts are written here, from what the wheel says of them. A file that no wheel lists is an
error, as is one that is missing. Two exceptions: bytecode, which comes from the image's
interpreter, is taken beside its source; and of what was built from source there is no wheel of the
index, so its own RECORD counts. Both are why environments are not shared between images.

A program of its own, with limits: it reads what others wrote. It is root where the control plane
is, mounts the installation's file system for itself alone, and opens what is there without
following a link. One JSON document comes on its standard input, one goes to its standard output.
"""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
import io
import json
import os
import re
import resource
import shlex
import stat
import sys
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atoll.drivers.local import spawner

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY = 1024 * 1024 * 1024
"""Address space, in bytes."""
MAX_DEPTH = 64
"""Directories in directories; the deepest packages have about twenty. A descriptor for each."""
MAX_FILES = 500_000
MAX_RECORD = 64 * 1024 * 1024
"""Bytes of a wheel's RECORD, or of a script that is written anew."""
PIECE = 1024 * 1024
LONGEST_SHEBANG = 120
"""Characters of an interpreter's path that every kernel takes."""
HASHES = ("sha256", "sha384", "sha512")
INFO = ".dist-info"
UNSIGNED = ("RECORD", "RECORD.jws", "RECORD.p7s")
"""What a RECORD lists without a hash."""
GENERATED = (
    "RECORD",
    "INSTALLER",
    "REQUESTED",
    "direct_url.json",
    "uv_cache.json",
    "uv_build.json",
)
"""Files that an installer adds to a distribution."""
LOCK = ".lock"
"""What uv leaves in the directory."""
BYTECODE = re.compile(
    r"(?:(.*)/)?__pycache__/([^/]+)\.(?:cpython|pypy|graalpy)[a-z0-9_-]*(?:\.opt-[12])?\.pyc"
)
POINT = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)((?:\.[A-Za-z_]\w*)*)\s*(?:\[.*\])?")
SCRIPT_NAME = re.compile(r"[\w.+-]*\w[\w.+-]*")
SCRIPT = """\
import sys
from {module} import {name}
if __name__ == "__main__":
    sys.exit({name}{rest}())
"""
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class NotKept(Exception):
    """Why what was installed is not kept, in words for the user."""


@dataclass
class Distribution:
    """What a wheel puts into a directory, by the paths there."""

    info: str
    """The name of its `.dist-info`."""
    digest: str = ""
    """Of the wheel; empty for one that was built."""
    files: dict[str, str] = field(default_factory=dict)
    """Hashes, as RECORD writes them."""
    scripts: dict[str, bytes] = field(default_factory=dict)
    """Content of those that are written here."""


# What wheels list


def from_wheel(path: str, digest: str, python: str) -> Distribution | None:
    try:
        with zipfile.ZipFile(path) as archive:
            return _read_wheel(archive, digest, python)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        raise NotKept(f"A wheel cannot be read: {str(error)[:200]}") from error


def _read_wheel(archive: zipfile.ZipFile, digest: str, python: str) -> Distribution | None:
    """None when it has no RECORD, with which nothing of it can be installed."""
    names = set(archive.namelist())
    records = [name for name in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)]
    if len(records) != 1:
        return None
    info = records[0].rpartition("/")[0]
    made = Distribution(info, digest)
    data = f"{info.removesuffix(INFO)}.data/"
    for path, value in _record(_entry(archive, records[0])):
        if path not in names or path in {f"{info}/{name}" for name in UNSIGNED}:
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
            raise NotKept(f"{info}: a wheel has files for {kind[:50]!r}.")
    points = f"{info}/entry_points.txt"
    if points in names:
        made.scripts.update(_entry_points(_entry(archive, points), python))
    return made


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _entry(archive: zipfile.ZipFile, name: str) -> bytes:
    with archive.open(name) as file:
        content = file.read(MAX_RECORD + 1)
    if len(content) > MAX_RECORD:
        raise NotKept(f"{name[:200]} of a wheel is too large.")
    return content


def _record(content: bytes) -> Iterator[tuple[str, str]]:
    """Paths and hashes; those without a hash are not checked and so not listed."""
    try:
        lines = list(csv.reader(io.StringIO(content.decode()), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise NotKept("The RECORD of a wheel cannot be read.") from error
    for line in lines:
        if len(line) != 3:
            raise NotKept("The RECORD of a wheel cannot be read.")
        path, value = line[0], line[1]
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in path or len(parts) > MAX_DEPTH:
            raise NotKept(f"The RECORD of a wheel lists {path[:200]!r}.")
        if value.partition("=")[0] in HASHES:
            yield path, value


def _written_anew(archive: zipfile.ZipFile, path: str, python: str) -> bytes | None:
    """A script whose first line names the interpreter of where it is installed."""
    with archive.open(path) as file:
        first = file.readline(200)
    if not first.startswith(b"#!python"):
        return None
    return _shebang(python) + _entry(archive, path).partition(b"\n")[2]


def _shebang(python: str) -> bytes:
    """The lines that have a script run by this interpreter."""
    if len(python) <= LONGEST_SHEBANG and not re.search(r"\s", python):
        return f"#!{python}\n".encode()
    # To a shell the second line is a command, to Python it is a string.
    return f"#!/bin/sh\n'''exec' {shlex.quote(python)} \"$0\" \"$@\"\n' '''\n".encode()


def _entry_points(content: bytes, python: str) -> dict[str, bytes]:
    parser = configparser.ConfigParser(delimiters=("=",), strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(content.decode())
    except (UnicodeDecodeError, configparser.Error) as error:
        raise NotKept("The entry points of a wheel cannot be read.") from error
    scripts = {}
    for section in ("console_scripts", "gui_scripts"):
        for name, value in parser.items(section) if parser.has_section(section) else ():
            found = POINT.fullmatch(value.strip())
            if found is None or SCRIPT_NAME.fullmatch(name) is None:
                raise NotKept(f"A wheel has the entry point {name[:100]!r}.")
            module, first, rest = found.groups()
            text = SCRIPT.format(module=module, name=first, rest=rest)
            scripts[f"bin/{name}"] = _shebang(python) + text.encode()
    return scripts


# What is there


class Tree:
    """A directory that others wrote, of which nothing is believed."""

    def __init__(self, path: str) -> None:
        self._top = os.open(path, DIRECTORY)
        self._device = os.fstat(self._top).st_dev

    def files(self) -> Iterator[str]:
        """The paths of all that is no directory. One descriptor for each level, so many levels."""
        waiting: list[tuple[int, str, list[str]]] = [(self._top, "", os.listdir(self._top))]
        count = 0
        while waiting:
            fd, path, names = waiting[-1]
            if not names:
                waiting.pop()
                if fd != self._top:
                    os.close(fd)
                continue
            name = names.pop()
            count += 1
            if count > MAX_FILES:
                raise NotKept(f"The packages have more than {MAX_FILES} files.")
            below = f"{path}{name}"
            if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                yield below
                continue
            if len(waiting) >= MAX_DEPTH:
                raise NotKept(f"A package has directories deeper than {MAX_DEPTH} levels.")
            inner = os.open(name, DIRECTORY, dir_fd=fd)
            waiting.append((inner, f"{below}/", os.listdir(inner)))

    def open(self, path: str) -> int:
        """A regular file of this file system. Raises `NotKept`."""
        *above, name = path.split("/")
        here = os.dup(self._top)
        try:
            for part in above:
                below = os.open(part, DIRECTORY, dir_fd=here)
                os.close(here)
                here = below
            fd = os.open(name, FILE, dir_fd=here)
        except FileNotFoundError:
            raise NotKept(f"A package lacks its file {path[:200]!r}.") from None
        except OSError as error:
            why = error.strerror
            raise NotKept(f"A package has {path[:200]!r}, which cannot be read: {why}.") from None
        finally:
            os.close(here)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_dev != self._device:
            os.close(fd)
            raise NotKept(f"A package has {path[:200]!r}, which is no file.")
        return fd


class Kept:
    """The new directory, which is this process's alone."""

    def __init__(self, path: str) -> None:
        self._path = path
        os.mkdir(path, 0o755)
        self._made = {""}

    def _place(self, path: str) -> str:
        directory = path.rpartition("/")[0]
        missing = []
        while directory not in self._made:
            missing.append(directory)
            directory = directory.rpartition("/")[0]
        for each in reversed(missing):
            os.mkdir(os.path.join(self._path, each), 0o755)
            self._made.add(each)
        return os.path.join(self._path, path)

    def write(self, path: str, content: bytes, *, executable: bool = False) -> None:
        with open(self._place(path), "xb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o755 if executable else 0o644)

    def copy(self, source: int, path: str, wanted: set[str] | None) -> str:
        """Its SHA-256 as RECORD has it. `wanted` are the hashes that it may have; any when none."""
        digests = {name: hashlib.new(name) for name in HASHES}
        used = {value.partition("=")[0] for value in wanted or ()} | {"sha256"}
        with open(source, "rb", buffering=0) as file, open(self._place(path), "xb") as copy:
            mode = os.fstat(source).st_mode
            while data := file.read(PIECE):
                copy.write(data)
                for name in used:
                    digests[name].update(data)
            os.fchmod(copy.fileno(), 0o755 if mode & 0o111 else 0o644)
        found = {f"{name}={_encoded(digests[name].digest())}" for name in used}
        if wanted is not None and not found & wanted:
            raise NotKept(f"The file {path[:200]!r} is not that of its wheel.")
        return f"sha256={_encoded(digests['sha256'].digest())}"


def _encoded(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def collect(request: dict[str, Any]) -> list[list[str]]:
    """Of each distribution: the name of its `.dist-info`, and the digest of its wheel."""
    try:
        tree = Tree(request["source"])
    except OSError:
        raise NotKept("The installation made no packages.") from None
    try:
        there = set(tree.files()) - {LOCK}
    except OSError as error:
        raise NotKept(f"What was installed cannot be read: {error.strerror}.") from error
    known: dict[str, list[Distribution]] = {}
    for wheel in request["wheels"]:
        made = from_wheel(wheel["path"], wheel["digest"], request["python"])
        if made is not None:
            known.setdefault(made.info, []).append(made)
    found = []
    for info in sorted({path.partition("/")[0] for path in there if f"{INFO}/" in path}):
        if not info.endswith(INFO) or f"{info}/METADATA" not in there:
            continue
        if info in known:
            # Of several, for different platforms, the one whose files are all there.
            fitting = [each for each in known[info] if set(each.files) <= there]
            found.append((fitting or known[info])[0])
        elif request["source_builds"]:
            found.append(_built(tree, info, request["python"]))
        else:
            raise NotKept(f"{info[:200]} is not of a wheel that the index has given.")
    _keep(tree, there, found, Kept(request["target"]))
    return [[each.info, each.digest] for each in found]


def _built(tree: Tree, info: str, python: str) -> Distribution:
    """One that was built from source, which lists its files itself."""
    made = Distribution(info)
    for path, value in _record(_content(tree, f"{info}/RECORD")):
        if path not in {f"{info}/{name}" for name in GENERATED}:
            made.files[path] = value
    if f"{info}/entry_points.txt" in made.files:
        made.scripts = _entry_points(_content(tree, f"{info}/entry_points.txt"), python)
        for path in made.scripts:
            made.files.pop(path, None)
    return made


def _content(tree: Tree, path: str) -> bytes:
    with open(tree.open(path), "rb") as file:
        content = file.read(MAX_RECORD + 1)
    if len(content) > MAX_RECORD:
        raise NotKept(f"{path[:200]} is too large.")
    return content


def _keep(tree: Tree, there: set[str], found: list[Distribution], kept: Kept) -> None:
    wanted: dict[str, set[str]] = {}
    scripts: dict[str, bytes] = {}
    generated: set[str] = set()
    for each in found:
        for path, value in each.files.items():
            # Two packages may bring the same file.
            wanted.setdefault(path, set()).add(value)
        scripts.update(each.scripts)
        generated |= {f"{each.info}/{name}" for name in (*GENERATED, *UNSIGNED)}
    generated -= set(wanted)
    hashes: dict[str, str] = {}
    for path in sorted(there - generated - set(scripts)):
        bytecode = BYTECODE.fullmatch(path)
        if path in wanted and bytecode is None:
            hashes[path] = kept.copy(tree.open(path), path, wanted.pop(path))
        elif bytecode is not None and _source(bytecode) in there:
            wanted.pop(path, None)
            if _source(bytecode) not in scripts:
                kept.copy(tree.open(path), path, None)
        else:
            raise NotKept(f"No package lists the file {path[:200]!r}.")
    for path in wanted:
        if path not in scripts and BYTECODE.fullmatch(path) is None:
            raise NotKept(f"A package lacks its file {path[:200]!r}.")
    for path, content in scripts.items():
        kept.write(path, content, executable=True)
        hashes[path] = f"sha256={_encoded(hashlib.sha256(content).digest())}"
    for each in found:
        _write_info(each, hashes, kept)


def _source(bytecode: re.Match[str]) -> str:
    directory, stem = bytecode.groups()
    return f"{directory}/{stem}.py" if directory else f"{stem}.py"


def _write_info(each: Distribution, hashes: dict[str, str], kept: Kept) -> None:
    """What an installer adds: who installed it, and the files as they are now."""
    installer = b"uv\n"
    kept.write(f"{each.info}/INSTALLER", installer)
    text = io.StringIO()
    record = csv.writer(text, lineterminator="\n")
    for path in sorted({*each.files, *each.scripts}):
        if path in hashes:
            record.writerow((path, hashes[path], ""))
    value = f"sha256={_encoded(hashlib.sha256(installer).digest())}"
    record.writerow((f"{each.info}/INSTALLER", value, len(installer)))
    record.writerow((f"{each.info}/RECORD", "", ""))
    kept.write(f"{each.info}/RECORD", text.getvalue().encode())


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    request = json.load(sys.stdin)
    os.umask(0o022)
    if request["image"]:
        spawner.own_mounts()
        spawner.mount_image(request["image"], request["mount"])
    try:
        answer: dict[str, Any] = {"distributions": collect(request)}
    except NotKept as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
