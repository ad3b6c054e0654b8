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
import csv
import hashlib
import io
import json
import os
import re
import resource
import stat
import sys
from typing import TYPE_CHECKING, Any

from atoll.drivers.shared import mount_calls
from atoll.drivers.shared.packages.wheel_files import (
    GENERATED,
    HASHES,
    INFO,
    MAX_DEPTH,
    MAX_RECORD,
    Distribution,
    NotKept,
    entry_point_scripts,
    from_wheel,
    read_record,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY = 1024 * 1024 * 1024
"""Address space, in bytes."""
MAX_FILES = 500_000
PIECE = 1024 * 1024
LOCK = ".lock"
"""What uv leaves in the directory."""
BYTECODE = re.compile(
    r"(?:(.*)/)?__pycache__/([^/]+)\.(?:cpython|pypy|graalpy)[a-z0-9_-]*(?:\.opt-[12])?\.pyc"
)
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class RootFileSystem:
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
        tree = RootFileSystem(request["source"])
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


def _built(tree: RootFileSystem, info: str, python: str) -> Distribution:
    """One that was built from source, which lists its files itself."""
    made = Distribution(info)
    for path, value in read_record(_content(tree, f"{info}/RECORD")):
        if path not in {f"{info}/{name}" for name in GENERATED}:
            made.files[path] = value
    if f"{info}/entry_points.txt" in made.files:
        made.scripts = entry_point_scripts(_content(tree, f"{info}/entry_points.txt"), python)
        for path in made.scripts:
            made.files.pop(path, None)
    return made


def _content(tree: RootFileSystem, path: str) -> bytes:
    with open(tree.open(path), "rb") as file:
        content = file.read(MAX_RECORD + 1)
    if len(content) > MAX_RECORD:
        raise NotKept(f"{path[:200]} is too large.")
    return content


def _keep(tree: RootFileSystem, there: set[str], found: list[Distribution], kept: Kept) -> None:
    wanted: dict[str, set[str]] = {}
    scripts: dict[str, bytes] = {}
    generated: set[str] = set()
    for each in found:
        for path, value in each.files.items():
            # Two packages may bring the same file.
            wanted.setdefault(path, set()).add(value)
        scripts.update(each.scripts)
        generated |= {f"{each.info}/{name}" for name in GENERATED}
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
        mount_calls.own_mounts()
        mount_calls.mount_image(request["image"], request["mount"])
    try:
        answer: dict[str, Any] = {"distributions": collect(request)}
    except NotKept as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
