"""
Package environments on this machine: directories that never change, in one directory that every
instance has read-only and cannot list.

What is known of them (their size, when they were used last, what a set of requirements came to) is
kept beside that directory, in small files that are written whole or not at all, because several
replicas may share the node. One is removed only by who holds the lock, and under it looks once more
when it was used.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from packaging.utils import InvalidName, canonicalize_name

from atoll.drivers.local import sandbox
from atoll.drivers.local.installer import InstallFailed, tree_size
from atoll.drivers.local.workspaces import remove_tree
from atoll.errors import PermanentError
from atoll.model.packages import EnvironmentInfo, Interpreter, PackageSet
from atoll.model.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from atoll.drivers.base import Answer, InstallSpec
    from atoll.model.template import Template

NAME = re.compile(r"[0-9a-f]{16,64}")
DESCRIBE_SECONDS = 60.0
DESCRIBE = Resources(cpu=1.0, memory=256 * 1024 * 1024, disk=16 * 1024 * 1024, max_processes=16)
MOST_PACKAGES = 2000
NO_UV = "uv is not installed on this node; install it with: pip install uv"
PINNED = re.compile(r"([a-z0-9][a-z0-9.-]{0,150})==([A-Za-z0-9][A-Za-z0-9.!+_-]{0,100})")


Tree = TypeVar("Tree")
Tree_contra = TypeVar("Tree_contra", contravariant=True)
"""What of a template's image the node's installer needs to know."""


class Installer(Protocol[Tree_contra]):
    def run(
        self,
        tree: Tree_contra,
        order: dict[str, Any],
        *,
        resources: Resources,
        answer: Answer | None,
        hear: Callable[[bytes], None],
    ) -> AbstractAsyncContextManager[tuple[dict[str, Any], Path]]:
        """
        What the program of an installation answers to an order, and the directory that it could
        write to, which goes when this is left.
        """


class LocalEnvironments(Generic[Tree]):
    def __init__(
        self, node: Path, *, root: bool, tree: Callable[[Template], Awaitable[Tree]]
    ) -> None:
        self.place = node / "packages"
        self._about = node / "package-records"
        self._sets = self._about / "sets"
        self._logs = self._about / "logs"
        self._root = root
        self._tree = tree
        self._installer: Installer[Tree] | None = None
        self._trouble = NO_UV

    def open(self, installer: Installer[Tree] | None, trouble: str = NO_UV) -> None:
        """Without an installer, for the `trouble`, what is there can be used all the same."""
        for directory in (self._about, self._sets, self._logs):
            directory.mkdir(exist_ok=True, mode=0o700)
        self.place.mkdir(exist_ok=True)
        # Who knows a name gets in; nobody gets the names. Inside, another uid than this one, or
        # this one on a mount that is read-only.
        self.place.chmod(0o711 if self._root else 0o311)
        self._installer, self._trouble = installer, trouble

    def inside(self, name: str) -> str:
        return f"{sandbox.PACKAGES}/{name}"

    async def check(self) -> None:
        self._needed()

    # Interpreters

    async def interpreter(self, template: Template) -> Interpreter:
        printed = bytearray()

        def hear(data: bytes) -> None:
            if len(printed) < 4096:
                printed.extend(data)

        # As the executor has it: this machine's interpreter without this machine's hooks.
        order = {"kind": "describe", "hooks": bool(template.root or template.python)}
        try:
            async with (
                asyncio.timeout(DESCRIBE_SECONDS),
                self._needed().run(
                    await self._tree(template), order, resources=DESCRIBE, answer=None, hear=hear
                ) as (answer, _),
            ):
                return Interpreter(answer["version"], answer["platform"], answer["packages"])
        except (InstallFailed, TimeoutError, KeyError) as error:
            said = printed.decode(errors="replace").strip()[-1000:]
            raise PermanentError(
                f"Template {template.id} does not tell which packages it has: {said or error!r}",
                code="dependency_failed",
            ) from error

    def _needed(self) -> Installer[Tree]:
        if self._installer is None:
            raise PermanentError(self._trouble, code="packages_not_configured")
        return self._installer

    # Sets

    async def find(self, key: str, *, since: datetime | None) -> PackageSet | None:
        return await asyncio.to_thread(self._find, key, since)

    def _find(self, key: str, since: datetime | None) -> PackageSet | None:
        known = _read(self._sets / _checked(key))
        if known is None:
            return None
        made_at = datetime.fromtimestamp(known["made_at"], UTC)
        if since is not None and made_at < since:
            return None
        name = known["environment"]
        if name is not None and not self._use(name):
            return None
        return PackageSet(name, tuple(known["installed"]), made_at)

    async def install(self, spec: InstallSpec) -> PackageSet:
        order = {
            "kind": "install",
            "requirements": list(spec.requirements),
            "constraints": [f"{name}=={version}" for name, version in spec.held.items()],
            "have": spec.has,
            "exact": spec.exact,
            "source_builds": spec.source_builds,
        }
        tree = await self._tree(spec.template)
        async with self._needed().run(
            tree, order, resources=spec.resources, answer=spec.answer, hear=spec.hear
        ) as (answer, build):
            if "error" in answer:
                raise InstallFailed(str(answer["error"])[:2000])
            installed = _installed(answer)
            name = spec.name(installed) if answer["own"] else None
            # To its end: half a move would be half an environment.
            keeping = asyncio.to_thread(self._keep, spec.key, build / "target", name, installed)
            return await asyncio.shield(asyncio.ensure_future(keeping))

    def _keep(
        self, key: str, target: Path, name: str | None, installed: tuple[str, ...]
    ) -> PackageSet:
        now = time.time()
        if name is not None and not self._use(name):
            _make_plain(target, own=self._root)
            size = tree_size(target)
            with self._locked():
                with contextlib.suppress(OSError):
                    # Fails when another replica was faster: a directory that is not empty stays.
                    target.rename(self.place / _checked(name))
                _write(self._about / name, {"size": size, "installed": installed})
        if name is not None and not self._use(name):
            raise InstallFailed("The packages could not be kept on this node.")
        record = {"environment": name, "installed": installed, "made_at": now}
        _write(self._sets / _checked(key), record)
        return PackageSet(name, installed, datetime.fromtimestamp(now, UTC))

    # What is there

    async def use(self, name: str) -> bool:
        return await asyncio.to_thread(self._use, name)

    def _use(self, name: str) -> bool:
        with self._locked():
            if not (self.place / _checked(name)).is_dir():
                return False
            try:
                os.utime(self._about / name)
            except FileNotFoundError:
                return False
            return True

    async def listed(self) -> list[EnvironmentInfo]:
        return await asyncio.to_thread(self._listed)

    def _listed(self) -> list[EnvironmentInfo]:
        found = []
        for entry in os.scandir(self._about):
            if not NAME.fullmatch(entry.name) or (known := _read(self._about / entry.name)) is None:
                continue
            with contextlib.suppress(FileNotFoundError):
                used_at = datetime.fromtimestamp(entry.stat().st_mtime, UTC)
                found.append(EnvironmentInfo(entry.name, int(known["size"]), used_at))
        return sorted(found, key=lambda info: info.used_at)

    async def remove(self, name: str, *, unless_used_since: datetime) -> bool:
        return await asyncio.to_thread(self._remove, name, unless_used_since)

    def _remove(self, name: str, since: datetime) -> bool:
        record, away = self._about / _checked(name), self._about / f"gone-{secrets.token_hex(8)}"
        with self._locked():
            with contextlib.suppress(FileNotFoundError):
                if record.stat().st_mtime >= since.timestamp():
                    return False
            with contextlib.suppress(FileNotFoundError):
                # Out of the way at once; it is not there half.
                (self.place / name).rename(away)
            record.unlink(missing_ok=True)
        remove_tree(away)
        return True

    async def forget(self, before: datetime) -> None:
        await asyncio.to_thread(self._forget, before.timestamp())

    def _forget(self, before: float) -> None:
        for entry in [*os.scandir(self._logs), *os.scandir(self._sets)]:
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime < before and not self._still_good(entry):
                    os.unlink(entry.path)
        for entry in os.scandir(self._about):
            if entry.name.startswith("gone-"):
                remove_tree(self._about / entry.name)  # Whoever began with it was killed.

    def _still_good(self, entry: os.DirEntry[str]) -> bool:
        """Whether it is a set whose packages are there."""
        if not entry.path.startswith(f"{self._sets}/"):
            return False
        known = _read(self._sets / entry.name)
        return known is not None and (
            known["environment"] is None or (self._about / known["environment"]).exists()
        )

    # Logs

    async def write_log(self, session_id: str, text: bytes) -> None:
        await asyncio.to_thread(_replace, self._logs / _plain(session_id), text)

    async def read_log(self, session_id: str) -> bytes | None:
        def read() -> bytes | None:
            try:
                return (self._logs / _plain(session_id)).read_bytes()
            except FileNotFoundError:
                return None

        return await asyncio.to_thread(read)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self._about / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _checked(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of an environment")
    return name


def _plain(session_id: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", session_id):
        raise ValueError(f"{session_id!r} is no id")
    return session_id


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except (FileNotFoundError, ValueError):
        return None


def _write(path: Path, content: dict[str, Any]) -> None:
    _replace(path, json.dumps(content).encode())


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_bytes(content)
    temporary.replace(path)


def _installed(answer: dict[str, Any]) -> tuple[str, ...]:
    """What the program says it installed. Where source builds are allowed it may say anything."""
    listed = answer.get("installed")
    if not isinstance(listed, list) or len(listed) > MOST_PACKAGES:
        raise InstallFailed(f"The dependencies come to more than {MOST_PACKAGES} packages.")
    for line in listed:
        found = PINNED.fullmatch(line) if isinstance(line, str) else None
        try:
            if found is None or canonicalize_name(found[1], validate=True) != found[1]:
                raise InvalidName
        except InvalidName:
            raise InstallFailed(f"The installation told of {str(line)[:100]!r}.") from None
    return tuple(listed)


def _make_plain(top: Path, *, own: bool) -> None:
    """
    Files and directories that anybody may read and nobody may write, links that lead nowhere else.
    Nothing runs in it any more, so that what was looked at stays as it is.
    """
    if not top.is_dir() or top.is_symlink():
        raise InstallFailed("The installation made no packages.")
    top.chmod(0o755)
    for directory, names, files, fd in os.fwalk(top, follow_symlinks=False, onerror=_refuse):
        if own:
            os.fchown(fd, 0, 0)
        for name in (*names, *files):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if own:
                os.chown(name, 0, 0, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                _check_link(top, directory, name, os.readlink(name, dir_fd=fd))
            elif stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
                # A directory before it is gone into, which it may not allow.
                closed = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o111
                os.chmod(name, 0o644 if closed else 0o755, dir_fd=fd)
            else:
                raise InstallFailed(f"A package has {name!r}, which is neither file nor directory.")


def _refuse(error: OSError) -> None:
    raise InstallFailed(f"What was installed cannot be read: {error.strerror}.")


def _check_link(top: Path, directory: str, name: str, target: str) -> None:
    place = os.path.normpath(os.path.join(directory, target))
    if os.path.isabs(target) or not place.startswith(f"{top}/"):
        raise InstallFailed(f"A package has a link {name!r} that leads out of it.")
