"""
Package environments on this machine: directories that never change, below one directory that every
instance has read-only and cannot list.

Records of them (size, last use, results of installations) are small files beside that directory,
replaced atomically because several replicas may share the node. An environment is removed under a
lock, after one more look at its last use. What an installation made is copied by `verify_program`,
which trusts none of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from atoll.drivers.shared import instance_paths
from atoll.drivers.shared.file_trees import remove_tree, tree_size
from atoll.drivers.shared.packages import install_results
from atoll.drivers.shared.packages.install_results import InstallFailed
from atoll.drivers.shared.packages.installation import record_owner
from atoll.drivers.shared.packages.verification import verify
from atoll.errors import DependencyFailed, PermanentError
from atoll.model.packages import EnvironmentInfo, PackageSet
from atoll.model.resources import Resources

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from atoll.drivers.base import ConnectionHandler, InstallSpec
    from atoll.drivers.shared.packages.installation import InstallOutput
    from atoll.model.packages import Interpreter
    from atoll.model.template import Template

NAME = re.compile(r"[0-9a-f]{16,64}")
DESCRIBE_TIMEOUT = 60.0
DESCRIBE_RESOURCES = Resources(
    cpu=1.0, memory=256 * 1024 * 1024, disk=16 * 1024 * 1024, max_processes=16
)
INSTALLS = "installs"
NO_UV = "uv is not installed on this node; install it with: pip install uv"

Base = TypeVar("Base")
Base_contra = TypeVar("Base_contra", contravariant=True)
"""What the node's installer needs to know of a template's image."""


class Installer(Protocol[Base_contra]):
    def run(
        self,
        tree: Base_contra,
        order: dict[str, Any],
        *,
        resources: Resources,
        handler: ConnectionHandler | None,
        on_output: Callable[[bytes], None],
    ) -> AbstractAsyncContextManager[InstallOutput]:
        """Run an order with `install_program`; its output is removed at the end of the block."""


class NodeEnvironments(Generic[Base]):
    def __init__(
        self,
        node: Path,
        *,
        root: bool,
        tree: Callable[[Template], Awaitable[Base]],
        image: Callable[[Template], Awaitable[tuple[str, ...]]],
    ) -> None:
        """`image` identifies a template's image, without asking the image itself."""
        self._installs = node / INSTALLS
        self.directory = node / "packages"
        self._records = node / "package-records"
        self._sets = self._records / "sets"
        self._logs = self._records / "logs"
        self._root = root
        self._tree = tree
        self._image = image
        self._installer: Installer[Base] | None = None
        self._problem = NO_UV

    def open(self, installer: Installer[Base] | None, problem: str = NO_UV) -> None:
        """Without an installer, existing environments can be used; `problem` is the reason."""
        for directory in (self._records, self._sets, self._logs):
            directory.mkdir(exist_ok=True, mode=0o700)
        self.directory.mkdir(exist_ok=True)
        # Instances can enter an environment by its name, and cannot list the names: they have
        # another uid than this process, or a read-only mount.
        self.directory.chmod(0o711 if self._root else 0o311)
        self._installer, self._problem = installer, problem

    def inside(self, name: str) -> str:
        return f"{instance_paths.PACKAGES}/{name}"

    async def check(self) -> None:
        self._require_installer()

    # Interpreters

    async def interpreter(self, template: Template) -> Interpreter:
        printed = bytearray()

        def on_output(data: bytes) -> None:
            if len(printed) < 4096:
                printed.extend(data)

        # As in an instance: this machine's interpreter runs without this machine's .pth files.
        order = {"kind": "describe", "hooks": bool(template.root or template.python)}
        try:
            async with (
                asyncio.timeout(DESCRIBE_TIMEOUT),
                self._require_installer().run(
                    await self._tree(template),
                    order,
                    resources=DESCRIBE_RESOURCES,
                    handler=None,
                    on_output=on_output,
                ) as made,
            ):
                return install_results.interpreter(made.answer, await self._image(template))
        except (InstallFailed, TimeoutError) as error:
            output = printed.decode(errors="replace").strip()[-1000:]
            raise DependencyFailed(
                f"The packages of template {template.id} cannot be read: {output or error!r}",
            ) from error

    def _require_installer(self) -> Installer[Base]:
        if self._installer is None:
            raise PermanentError(self._problem, code="packages_not_configured")
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
            "constraints": [f"{name}=={version}" for name, version in spec.pinned.items()],
            "have": spec.template_packages,
            "exact": spec.exact,
            "source_builds": spec.source_builds,
        }
        tree = await self._tree(spec.template)
        async with self._require_installer().run(
            tree,
            order,
            resources=spec.resources,
            handler=spec.serve_index,
            on_output=spec.on_output,
        ) as made:
            claimed = install_results.installed(made.answer)
            held = {
                name: found
                for name, found in claimed.items()
                if spec.template_packages.get(name) == found
            }
            kept: Path | None = None
            digests: tuple[str, ...] = ()
            if len(held) < len(claimed):
                kept = made.directory / "kept"
                own_names, digests = await verify(made, kept, spec, claimed)
                held = {name: found for name, found in claimed.items() if name not in own_names}
            install_results.check_held(held, spec.template_packages)
            installed = tuple(f"{name}=={claimed[name]}" for name in sorted(claimed))
            name = None if kept is None else spec.environment_name(installed, digests)
            # Not cancelled half-way: the environment would be incomplete.
            keeping = asyncio.to_thread(self._keep, spec.key, kept, name, installed)
            return await asyncio.shield(asyncio.ensure_future(keeping))

    def _keep(
        self, key: str, kept: Path | None, name: str | None, installed: tuple[str, ...]
    ) -> PackageSet:
        now = time.time()
        if kept is not None and name is not None and not self._use(name):
            size = tree_size(kept)
            with self._locked():
                with contextlib.suppress(OSError):
                    # Fails if another replica was faster: directories with files are not replaced.
                    kept.rename(self.directory / _checked(name))
                _write(self._records / name, {"size": size, "installed": installed})
        if name is not None and not self._use(name):
            raise InstallFailed("The packages could not be stored on this node.")
        record = {"environment": name, "installed": installed, "made_at": now}
        _write(self._sets / _checked(key), record)
        return PackageSet(name, installed, datetime.fromtimestamp(now, UTC))

    @contextlib.asynccontextmanager
    async def downloads(self) -> AsyncIterator[Path]:
        directory = self._installs / f"download_{secrets.token_hex(10)}"

        def make() -> None:
            directory.mkdir(mode=0o700)
            # If this process is killed, the next one removes the directory, like an installation.
            record_owner(directory)

        try:
            await asyncio.to_thread(make)
            yield directory
        finally:
            await asyncio.shield(asyncio.to_thread(remove_tree, directory))

    # What is there

    async def use(self, name: str) -> bool:
        return await asyncio.to_thread(self._use, name)

    def _use(self, name: str) -> bool:
        with self._locked():
            if not (self.directory / _checked(name)).is_dir():
                return False
            try:
                os.utime(self._records / name)
            except FileNotFoundError:
                return False
            return True

    async def listed(self) -> list[EnvironmentInfo]:
        return await asyncio.to_thread(self._listed)

    def _listed(self) -> list[EnvironmentInfo]:
        found = []
        for entry in os.scandir(self._records):
            if (
                not NAME.fullmatch(entry.name)
                or (known := _read(self._records / entry.name)) is None
            ):
                continue
            with contextlib.suppress(FileNotFoundError):
                used_at = datetime.fromtimestamp(entry.stat().st_mtime, UTC)
                found.append(EnvironmentInfo(entry.name, int(known["size"]), used_at))
        return sorted(found, key=lambda info: info.used_at)

    async def remove(self, name: str, *, unless_used_since: datetime) -> bool:
        return await asyncio.to_thread(self._remove, name, unless_used_since)

    def _remove(self, name: str, since: datetime) -> bool:
        record, away = (
            self._records / _checked(name),
            self._records / f"gone-{secrets.token_hex(8)}",
        )
        with self._locked():
            with contextlib.suppress(FileNotFoundError):
                if record.stat().st_mtime >= since.timestamp():
                    return False
            with contextlib.suppress(FileNotFoundError):
                # Atomic: no instance sees half of an environment.
                (self.directory / name).rename(away)
            record.unlink(missing_ok=True)
        remove_tree(away)
        return True

    async def forget(self, before: datetime) -> None:
        await asyncio.to_thread(self._forget, before.timestamp())

    def _forget(self, before: float) -> None:
        for entry in [*os.scandir(self._logs), *os.scandir(self._sets)]:
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime < before and not self._is_valid_set(entry):
                    os.unlink(entry.path)
        for entry in os.scandir(self._records):
            if entry.name.startswith("gone-"):
                remove_tree(self._records / entry.name)  # Its removal was interrupted.

    def _is_valid_set(self, entry: os.DirEntry[str]) -> bool:
        """Whether it records an installation whose environment still exists."""
        if not entry.path.startswith(f"{self._sets}/"):
            return False
        known = _read(self._sets / entry.name)
        return known is not None and (
            known["environment"] is None or (self._records / known["environment"]).exists()
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
        fd = os.open(self._records / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _checked(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name of an environment")
    return name


def _plain(session_id: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", session_id):
        raise ValueError(f"{session_id!r} is not an id")
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
