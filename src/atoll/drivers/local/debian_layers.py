"""
Layers: what Debian packages add to a root file system, each a directory.

The name of a layer is a digest of what it is made from. A layer never changes; templates and
replicas of a node share it. It exists completely or not at all: an interrupted build leaves a
directory whose name begins with a dot, which is removed when the layer is built again or discarded.
The spawner mounts layers for each instance, as an overlay.

Callers ensure that one process at a time builds a layer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.drivers.local import apt_sources, layer_builder
from atoll.drivers.local.layer_builder import SCRATCH
from atoll.drivers.local.sandbox_host import free_stage
from atoll.drivers.shared import disk_images, file_trees, subprogram
from atoll.drivers.shared.cgroups import GroupBusy, enter, kill_and_remove
from atoll.errors import InvalidRequest, PermanentError, TemporaryError
from atoll.model.packages import INSTALL_CPU, INSTALL_PROCESSES
from atoll.model.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from atoll.drivers.local.apt_proxy import AptProxy
    from atoll.drivers.local.sandbox_host import SandboxHost
    from atoll.model.template import Layer
    from atoll.settings import LocalSettings, PackageSettings

BUILD_FAILED, BUILD_INTERRUPTED = "build_failed", "build_interrupted"
TOOLS = ("usr/bin/apt-get", "usr/bin/apt-cache", "usr/bin/dpkg", "bin/sh")
SCRIPT = f"""set -e
apt-get -q update
for package; do
    name=${{package%%=*}}
    apt-cache pkgnames --all-names "$name" > {SCRATCH}/names
    found=
    while IFS= read -r line; do [ "$line" = "$name" ] && found=yes; done < {SCRATCH}/names
    [ "$found" ] || {{ echo "E: Unable to locate package $name"; exit 100; }}
done
exec apt-get -q install -- "$@"
"""
"""
apt interprets an unknown name as a pattern, as a task, or as another name with a suffix that
removes the package. The exact name of a known package has no other interpretation.
"""
START_TIMEOUT = 60.0
"""Seconds to make the sandbox, including its file system image."""
KILL_TIMEOUT = 10.0
MAX_ERROR = 500
"""Characters of the log that an error quotes."""
_NAME = re.compile(r"[0-9a-f]{40}")


class Layers:
    def __init__(self, directory: Path, local: LocalSettings, settings: PackageSettings) -> None:
        self._directory = directory
        self._local = local
        self._settings = settings
        self._host: SandboxHost | None = None
        self._problem = "the driver is not open"

    def open(self, host: SandboxHost, problem: str | None) -> None:
        """`problem` is why no layer can be built here, if so."""
        self._directory.mkdir(exist_ok=True, mode=0o700)
        self._host = host
        self._problem = problem or ""
        for name in host.groups.names():
            if name.startswith("build-"):
                with contextlib.suppress(GroupBusy):  # Another replica is building it.
                    host.groups.remove(name)

    def directory(self, layer: Layer) -> Path:
        return self._directory / layer.name

    def missing(self, layers: Sequence[Layer]) -> list[Layer]:
        return [layer for layer in layers if not self.directory(layer).is_dir()]

    def check(self, base: str) -> None:
        """Refuse root file systems on which this node cannot install packages."""
        if self._problem:
            raise InvalidRequest(
                f"debian_packages: they cannot be installed on this node: {self._problem}.",
                code="isolation_unavailable",
                field="debian_packages",
            )
        if not base:
            raise InvalidRequest(
                "debian_packages: they need a base_image to be installed on.", field="base_image"
            )
        for tool in TOOLS:
            if not os.path.lexists(Path(base) / tool):
                raise InvalidRequest(
                    f"base_image: {base} has no /{tool}; Debian packages cannot be put on it.",
                    field="base_image",
                )
        apt_sources.sources_of(Path(base), self._settings)

    def names(self) -> list[str]:
        """Names of all layers, including incomplete ones."""
        try:
            found = {entry.name.removeprefix(".") for entry in os.scandir(self._directory)}
        except FileNotFoundError:
            return []
        return sorted(name for name in found if _NAME.fullmatch(name))

    def discard(self, name: str) -> None:
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"not a layer: {name!r}")
        # Renamed first, so that half a layer is never used.
        away = self._directory / f".{name}"
        # Fails if there is no layer, or if an earlier call left one, which is removed now.
        with contextlib.suppress(OSError):
            (self._directory / name).rename(away / "gone" if away.is_dir() else away)
        file_trees.remove_tree(away)

    async def build(
        self,
        base: str,
        below: Sequence[Layer],
        layer: Layer,
        *,
        timeout: timedelta,
        on_output: Callable[[bytes], None],
    ) -> None:
        """
        Make the layer; `on_output` receives the output of apt. Raises `TemporaryError` if a retry
        may succeed.
        """
        # Imported here, with the HTTP client: most processes build no layer.
        from atoll.drivers.local.apt_proxy import AptProxy

        host = self._host
        assert host is not None
        await asyncio.to_thread(self.check, base)
        name = f"build-{layer.name}"
        directory = self._directory / f".{layer.name}"
        sources = await asyncio.to_thread(apt_sources.sources_of, Path(base), self._settings)
        try:
            await asyncio.to_thread(self._prepare, directory)
            host.groups.make(name, self._resources())
            proxy = AptProxy(sources.addresses)
            request = {
                **self._request(host, directory, base, below, sources),
                "packages": list(layer.packages),
                "copy_timeout": timeout.total_seconds(),
            }
            try:
                async with asyncio.timeout(timeout.total_seconds()):
                    status, output = await self._run(host, name, request, proxy, on_output)
            except TimeoutError:
                raise PermanentError(
                    f"The packages were not installed within {timeout.total_seconds():g} s.",
                    code=BUILD_FAILED,
                ) from None
            if status != 0:
                raise _failure(status, output, proxy)
            await asyncio.to_thread(self._finish, directory, layer)
        except OSError as error:
            raise TemporaryError(
                f"The layer could not be written: {error}", code=BUILD_INTERRUPTED
            ) from error
        finally:
            await asyncio.shield(asyncio.to_thread(self._clear, host, name, directory))

    def _resources(self) -> Resources:
        settings = self._settings
        return Resources(INSTALL_CPU, settings.memory, settings.disk, INSTALL_PROCESSES)

    def _prepare(self, directory: Path) -> None:
        file_trees.remove_tree(directory)
        directory.mkdir(mode=0o700)
        disk_images.make_file_system(directory / "image", self._settings.disk)

    def _request(
        self,
        host: SandboxHost,
        directory: Path,
        base: str,
        below: Sequence[Layer],
        sources: apt_sources.AptSources,
    ) -> dict[str, Any]:
        lower = [str(self.directory(one)) for one in reversed(below)]
        stage = free_stage((base, *lower, str(directory)))
        return {
            "bubblewrap": host.bubblewrap,
            "stage": stage,
            "image": str(directory / "image"),
            "base": os.path.realpath(base),
            "layers": lower,
            "target": str(directory / "layer"),
            "uid": self._local.build_uid,
            "hidden": host.hidden,
            "seccomp": None if host.seccomp is None else str(host.seccomp),
            "tmp_size": self._local.tmp_size,
            "files": {
                "apt.conf": apt_sources.CONFIG,
                "sources.list": "".join(f"{line}\n" for line in sources.lines),
            },
            "script": SCRIPT,
        }

    async def _run(
        self,
        host: SandboxHost,
        name: str,
        request: dict[str, Any],
        proxy: AptProxy,
        on_output: Callable[[bytes], None],
    ) -> tuple[int, str]:
        """Returns the exit status and the end of the output."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *subprogram.command(layer_builder), str(theirs.fileno()),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    cwd="/",
                )  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            last = bytearray()

            async def listen(output: asyncio.StreamReader) -> None:
                while data := await output.read(65_536):
                    on_output(data)
                    last.extend(data)
                    del last[: -8 * MAX_ERROR]

            listening = asyncio.ensure_future(listen(process.stdout))
            try:
                await asyncio.to_thread(enter, host.groups, name, process.pid)
                process.stdin.write(json.dumps(request).encode() + b"\n")
                await process.stdin.drain()
                listener = await self._listener(ours)
                if listener is not None:
                    with listener:
                        async with proxy.serve(listener):
                            await process.wait()
                await process.wait()
            finally:
                process.stdin.close()  # The builder then kills its sandbox and exits.
                try:
                    async with asyncio.timeout(KILL_TIMEOUT):
                        await process.wait()
                        await listening
                except TimeoutError:
                    process.kill()
                    listening.cancel()
        return process.returncode or 0, last.decode(errors="replace")

    async def _listener(self, control: socket.socket) -> socket.socket | None:
        """The socket on which the builder listens; None if it has ended."""
        control.setblocking(False)
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def on_readable() -> None:
            if not ready.done():
                ready.set_result(None)

        loop.add_reader(control, on_readable)
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await ready
        except TimeoutError:
            raise TemporaryError(
                f"The build did not start in {START_TIMEOUT:g} s.", code=BUILD_INTERRUPTED
            ) from None
        finally:
            loop.remove_reader(control)
        _, fds, _, _ = socket.recv_fds(control, 64, 1)
        return socket.socket(fileno=fds[0]) if fds else None

    def _finish(self, directory: Path, layer: Layer) -> None:
        (directory / "layer").rename(self.directory(layer))

    def _clear(self, host: SandboxHost, name: str, directory: Path) -> None:
        # Processes that do not end in time are removed by `open`.
        kill_and_remove(host.groups, name, KILL_TIMEOUT)
        file_trees.remove_tree(directory)


def _failure(status: int, output: str, proxy: AptProxy) -> TemporaryError | PermanentError:
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E:", "dpkg:"))] or lines[-3:]
    reason = "; ".join(errors)[-MAX_ERROR:]
    if proxy.problem is not None:
        return TemporaryError(
            f"The mirror could not be reached ({proxy.problem}): {reason}", code=BUILD_INTERRUPTED
        )
    if status < 0:
        return TemporaryError("The build was killed.", code=BUILD_INTERRUPTED)
    if status == layer_builder.NOT_COPIED:
        return TemporaryError(f"The layer could not be stored: {reason}", code=BUILD_INTERRUPTED)
    if status == layer_builder.UNUSABLE:
        return PermanentError(
            f"The sandbox of the build could not be created: {reason}", code=BUILD_FAILED
        )
    return PermanentError(f"The packages cannot be installed: {reason}", code=BUILD_FAILED)
