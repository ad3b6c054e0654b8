"""
Verifies what an installation has installed, and copies it to a new directory.

The files were written by programs of the template's image, which may be hostile, and by code of
packages, where source builds are allowed. So they are not trusted: each wheel from the index lists
its files with hashes (RECORD), and only these files are copied, if their hashes match. Scripts are
generated here from the wheel's entry points. A file that no wheel lists is an error, and so is a
missing one. There are two exceptions, because of which environments are not shared between images:
bytecode, made by the image's interpreter, is copied beside its source; and a source build, for
which the index has no wheel, is checked against its own RECORD.

A program of its own, with a memory limit, because it reads untrusted files. It runs as root if the
control plane does, mounts the installation's file system in a namespace of its own, and opens files
without following links. Reads one JSON document from standard input, writes one to standard output.
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

from atoll.drivers.shared import mount_syscalls
from atoll.drivers.shared.packages.wheel_files import (
    GENERATED,
    HASHES,
    INFO,
    MAX_DEPTH,
    MAX_RECORD,
    Distribution,
    Rejected,
    entry_point_scripts,
    from_wheel,
    read_record,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY = 1024 * 1024 * 1024
"""Address space, in bytes."""
MAX_FILES = 500_000
CHUNK_SIZE = 1024 * 1024
LOCK = ".lock"
"""A file that uv leaves in the directory."""
BYTECODE = re.compile(
    r"(?:(.*)/)?__pycache__/([^/]+)\.(?:cpython|pypy|graalpy)[a-z0-9_-]*(?:\.opt-[12])?\.pyc"
)
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class UntrustedTree:
    """A directory with untrusted contents."""

    def __init__(self, path: str) -> None:
        self._top = os.open(path, DIRECTORY)
        self._device = os.fstat(self._top).st_dev

    def files(self) -> Iterator[str]:
        """Paths of everything but directories. Takes a descriptor for each level."""
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
                raise Rejected(f"The packages have more than {MAX_FILES} files.")
            below = f"{path}{name}"
            if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                yield below
                continue
            if len(waiting) >= MAX_DEPTH:
                raise Rejected(f"A package has directories deeper than {MAX_DEPTH} levels.")
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
            raise Rejected(f"A package lacks its file {path[:200]!r}.") from None
        except OSError as error:
            why = error.strerror
            raise Rejected(f"A package has {path[:200]!r}, which cannot be read: {why}.") from None
        finally:
            os.close(here)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_dev != self._device:
            os.close(fd)
            raise Rejected(f"A package has {path[:200]!r}, which is not a regular file.")
        return fd


class NewDirectory:
    """The directory that the verified files are copied to."""

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
        """Returns the SHA-256. The file must have one of the hashes in `wanted`, if given."""
        digests = {name: hashlib.new(name) for name in HASHES}
        used = {value.partition("=")[0] for value in wanted or ()} | {"sha256"}
        with open(source, "rb", buffering=0) as file, open(self._place(path), "xb") as copy:
            mode = os.fstat(source).st_mode
            while data := file.read(CHUNK_SIZE):
                copy.write(data)
                for name in used:
                    digests[name].update(data)
            os.fchmod(copy.fileno(), 0o755 if mode & 0o111 else 0o644)
        found = {f"{name}={_encoded(digests[name].digest())}" for name in used}
        if wanted is not None and not found & wanted:
            raise Rejected(f"The file {path[:200]!r} differs from the file in its wheel.")
        return f"sha256={_encoded(digests['sha256'].digest())}"


def _encoded(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def verify(request: dict[str, Any]) -> list[list[str]]:
    """Returns the name of the `.dist-info` and the digest of the wheel of each distribution."""
    try:
        tree = UntrustedTree(request["source"])
    except OSError:
        raise Rejected("Nothing was installed.") from None
    try:
        present = set(tree.files()) - {LOCK}
    except OSError as error:
        raise Rejected(f"The installed files cannot be read: {error.strerror}.") from error
    known: dict[str, list[Distribution]] = {}
    for wheel in request["wheels"]:
        made = from_wheel(wheel["path"], wheel["digest"], request["python"])
        if made is not None:
            known.setdefault(made.info, []).append(made)
    found = []
    for info in sorted({path.partition("/")[0] for path in present if f"{INFO}/" in path}):
        if not info.endswith(INFO) or f"{info}/METADATA" not in present:
            continue
        if info in known:
            # If there are wheels for several platforms: the one whose files are all present.
            fitting = [each for each in known[info] if set(each.files) <= present]
            found.append((fitting or known[info])[0])
        elif request["source_builds"]:
            found.append(_built_distribution(tree, info, request["python"]))
        else:
            raise Rejected(f"{info[:200]} is not from a wheel of the index.")
    _copy_files(tree, present, found, NewDirectory(request["target"]))
    return [[each.info, each.digest] for each in found]


def _built_distribution(tree: UntrustedTree, info: str, python: str) -> Distribution:
    """A source build, by its own RECORD."""
    made = Distribution(info)
    for path, value in read_record(_content(tree, f"{info}/RECORD")):
        if path not in {f"{info}/{name}" for name in GENERATED}:
            made.files[path] = value
    if f"{info}/entry_points.txt" in made.files:
        made.scripts = entry_point_scripts(_content(tree, f"{info}/entry_points.txt"), python)
        for path in made.scripts:
            made.files.pop(path, None)
    return made


def _content(tree: UntrustedTree, path: str) -> bytes:
    with open(tree.open(path), "rb") as file:
        content = file.read(MAX_RECORD + 1)
    if len(content) > MAX_RECORD:
        raise Rejected(f"{path[:200]} is too large.")
    return content


def _copy_files(
    tree: UntrustedTree, present: set[str], found: list[Distribution], target: NewDirectory
) -> None:
    wanted: dict[str, set[str]] = {}
    scripts: dict[str, bytes] = {}
    generated: set[str] = set()
    for each in found:
        for path, value in each.files.items():
            # Two packages may contain the same file.
            wanted.setdefault(path, set()).add(value)
        scripts.update(each.scripts)
        generated |= {f"{each.info}/{name}" for name in GENERATED}
    hashes: dict[str, str] = {}
    for path in sorted(present - generated - set(scripts)):
        bytecode = BYTECODE.fullmatch(path)
        if path in wanted and bytecode is None:
            hashes[path] = target.copy(tree.open(path), path, wanted.pop(path))
        elif bytecode is not None and _source(bytecode) in present:
            wanted.pop(path, None)
            if _source(bytecode) not in scripts:
                target.copy(tree.open(path), path, None)
        else:
            raise Rejected(f"No package lists the file {path[:200]!r}.")
    for path in wanted:
        if path not in scripts and BYTECODE.fullmatch(path) is None:
            raise Rejected(f"A package lacks its file {path[:200]!r}.")
    for path, content in scripts.items():
        target.write(path, content, executable=True)
        hashes[path] = f"sha256={_encoded(hashlib.sha256(content).digest())}"
    for each in found:
        _write_info(each, hashes, target)


def _source(bytecode: re.Match[str]) -> str:
    directory, stem = bytecode.groups()
    return f"{directory}/{stem}.py" if directory else f"{stem}.py"


def _write_info(each: Distribution, hashes: dict[str, str], target: NewDirectory) -> None:
    """Write INSTALLER, and RECORD with the files as they were copied."""
    installer = b"uv\n"
    target.write(f"{each.info}/INSTALLER", installer)
    text = io.StringIO()
    record = csv.writer(text, lineterminator="\n")
    for path in sorted({*each.files, *each.scripts}):
        if path in hashes:
            record.writerow((path, hashes[path], ""))
    value = f"sha256={_encoded(hashlib.sha256(installer).digest())}"
    record.writerow((f"{each.info}/INSTALLER", value, len(installer)))
    record.writerow((f"{each.info}/RECORD", "", ""))
    target.write(f"{each.info}/RECORD", text.getvalue().encode())


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    request = json.load(sys.stdin)
    os.umask(0o022)
    if request["image"]:
        mount_syscalls.own_mounts()
        mount_syscalls.mount_image(request["image"], request["mount"])
    try:
        answer: dict[str, Any] = {"distributions": verify(request)}
    except Rejected as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
