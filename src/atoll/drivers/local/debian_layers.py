"""
Layers: what Debian packages add to a root file system, a directory each.

A layer has the name of what it was made from and never changes; templates and replicas of a node
share it. It is there whole or not at all: what a build leaves that was cut short is in a directory
whose name begins with a dot, and goes when the layer is built anew or discarded. Instances see it
through an overlay that is mounted for each of them by the spawner and goes with them.

One process at a time may build a layer of a name; callers see to it.
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
from atoll.drivers.local.apt_proxy import AptProxy
from atoll.drivers.local.layer_builder import SCRATCH
from atoll.drivers.local.sandbox_host import free_stage
from atoll.drivers.shared import disk_images, file_trees, program
from atoll.drivers.shared.cgroups import GroupBusy, enter, kill_and_remove
from atoll.errors import InvalidRequest, PermanentError, TemporaryError
from atoll.model.packages import INSTALL_CPU, INSTALL_PROCESSES
from atoll.model.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from atoll.drivers.local.sandbox_host import SandboxHost
    from atoll.model.template import Layer
    from atoll.settings import LocalSettings, PackageSettings

BUILD_FAILED, BUILD_INTERRUPTED = "build_failed", "build_interrupted"
STAGES = ("/mnt", "/media", "/srv", "/opt")
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
apt takes a name that it does not know for a pattern, a task, or another name with a sign that
removes it. One that it knows, by just these letters, it takes for nothing else.
"""
START_SECONDS = 60.0
"""For the sandbox to be made; a file system image among it."""
END_SECONDS = 10.0
LAST_WORDS = 500
"""Characters of the log that an error tells."""
_NAME = re.compile(r"[0-9a-f]{40}")


class Layers:
    def __init__(self, directory: Path, local: LocalSettings, settings: PackageSettings) -> None:
        self._directory = directory
        self._local = local
        self._settings = settings
        self._host: SandboxHost | None = None
        self._trouble = "the driver is not open"

    def open(self, host: SandboxHost, trouble: str | None) -> None:
        """`trouble` is why no layer can be built here."""
        self._directory.mkdir(exist_ok=True, mode=0o700)
        self._host = host
        self._trouble = trouble or ""
        for name in host.groups.names():
            if name.startswith("build-"):
                with contextlib.suppress(GroupBusy):  # Another replica is at it.
                    host.groups.remove(name)

    def place(self, layer: Layer) -> Path:
        return self._directory / layer.name

    def missing(self, layers: Sequence[Layer]) -> list[Layer]:
        return [layer for layer in layers if not self.place(layer).is_dir()]

    def check(self, base: str) -> None:
        """Whether packages can be installed on this root file system, on this node."""
        if self._trouble:
            raise InvalidRequest(
                f"debian_packages: they cannot be installed on this node: {self._trouble}.",
                code="isolation_unavailable",
                field="debian_packages",
            )
        if not base:
            raise InvalidRequest(
                "debian_packages: they need a base_image to be put on.", field="base_image"
            )
        for tool in TOOLS:
            if not os.path.lexists(Path(base) / tool):
                raise InvalidRequest(
                    f"base_image: {base} has no /{tool}; Debian packages cannot be put on it.",
                    field="base_image",
                )
        apt_sources.sources_of(Path(base), self._settings)

    def names(self) -> list[str]:
        """Those there are, and those of which something is left."""
        try:
            found = {entry.name.removeprefix(".") for entry in os.scandir(self._directory)}
        except FileNotFoundError:
            return []
        return sorted(name for name in found if _NAME.fullmatch(name))

    def discard(self, name: str) -> None:
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"not a layer: {name!r}")
        # Out of sight first: half a layer must not be taken for one.
        away = self._directory / f".{name}"
        # It fails when there is none, or when one is away already; then it goes the next time.
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
        say: Callable[[bytes], None],
    ) -> None:
        """
        Make the layer, telling what apt prints. `TemporaryError` when the same may go well later.
        """
        host = self._host
        assert host is not None
        await asyncio.to_thread(self.check, base)
        name = f"build-{layer.name}"
        making = self._directory / f".{layer.name}"
        found = await asyncio.to_thread(apt_sources.sources_of, Path(base), self._settings)
        try:
            await asyncio.to_thread(self._prepare, making)
            host.groups.make(name, self._resources())
            mirror = AptProxy(found.addresses)
            request = self._request(host, making, base, below, layer, found, timeout)
            try:
                async with asyncio.timeout(timeout.total_seconds()):
                    status, said = await self._run(host, name, request, mirror, say)
            except TimeoutError:
                raise PermanentError(
                    f"The packages were not installed in {timeout}.",
                    code=BUILD_FAILED,
                ) from None
            if status != 0:
                raise _failure(status, said, mirror)
            await asyncio.to_thread(self._finish, making, layer)
        except OSError as error:
            raise TemporaryError(
                f"The layer could not be written: {error}", code=BUILD_INTERRUPTED
            ) from error
        finally:
            await asyncio.shield(asyncio.to_thread(self._clear, host, name, making))

    def _resources(self) -> Resources:
        settings = self._settings
        return Resources(INSTALL_CPU, settings.memory, settings.disk, INSTALL_PROCESSES)

    def _prepare(self, making: Path) -> None:
        file_trees.remove_tree(making)
        making.mkdir(mode=0o700)
        disk_images.make_file_system(making / "image", self._settings.disk)

    def _request(
        self,
        host: SandboxHost,
        making: Path,
        base: str,
        below: Sequence[Layer],
        layer: Layer,
        found: apt_sources.AptSources,
        timeout: timedelta,
    ) -> dict[str, Any]:
        lower = [str(self.place(one)) for one in reversed(below)]
        stage = free_stage((base, *lower, str(making)))
        return {
            "bubblewrap": host.bubblewrap,
            "stage": stage,
            "image": str(making / "image"),
            "base": os.path.realpath(base),
            "layers": lower,
            "target": str(making / "layer"),
            "uid": self._local.build_uid,
            "hidden": host.hidden,
            "seccomp": None if host.seccomp is None else str(host.seccomp),
            "tmp_size": self._local.tmp_size,
            "files": {
                "apt.conf": apt_sources.CONFIG,
                "sources.list": "".join(f"{line}\n" for line in found.lines),
            },
            "script": SCRIPT,
            "packages": list(layer.packages),
            "copy_timeout": timeout.total_seconds(),
        }

    async def _run(
        self,
        host: SandboxHost,
        name: str,
        request: dict[str, Any],
        mirror: AptProxy,
        say: Callable[[bytes], None],
    ) -> tuple[int, str]:
        """How the build ended, and what it said last."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *program.command(layer_builder), str(theirs.fileno()),
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
                    say(data)
                    last.extend(data)
                    del last[: -8 * LAST_WORDS]

            listening = asyncio.ensure_future(listen(process.stdout))
            try:
                await asyncio.to_thread(enter, host.groups, name, process.pid)
                process.stdin.write(json.dumps(request).encode() + b"\n")
                await process.stdin.drain()
                listener = await self._listener(ours)
                if listener is not None:
                    with listener:
                        async with mirror.serve(listener):
                            await process.wait()
                await process.wait()
            finally:
                process.stdin.close()  # At which it ends what it started, and itself.
                try:
                    async with asyncio.timeout(END_SECONDS):
                        await process.wait()
                        await listening
                except TimeoutError:
                    process.kill()
                    listening.cancel()
        return process.returncode or 0, last.decode(errors="replace")

    async def _listener(self, control: socket.socket) -> socket.socket | None:
        """The socket that the builder listens on; none when it ended before."""
        control.setblocking(False)
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def heard() -> None:
            if not ready.done():
                ready.set_result(None)

        loop.add_reader(control, heard)
        try:
            async with asyncio.timeout(START_SECONDS):
                await ready
        except TimeoutError:
            raise TemporaryError(
                f"The build did not start in {START_SECONDS:g} s.", code=BUILD_INTERRUPTED
            ) from None
        finally:
            loop.remove_reader(control)
        _, fds, _, _ = socket.recv_fds(control, 64, 1)
        return socket.socket(fileno=fds[0]) if fds else None

    def _finish(self, making: Path, layer: Layer) -> None:
        (making / "layer").rename(self.place(layer))

    def _clear(self, host: SandboxHost, name: str, making: Path) -> None:
        # Its processes end a moment after it; what does not, `open` finds.
        kill_and_remove(host.groups, name, END_SECONDS)
        file_trees.remove_tree(making)


def _failure(status: int, said: str, mirror: AptProxy) -> TemporaryError | PermanentError:
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E:", "dpkg:"))] or lines[-3:]
    words = "; ".join(errors)[-LAST_WORDS:]
    if mirror.problem is not None:
        return TemporaryError(
            f"The mirror could not be reached ({mirror.problem}): {words}", code=BUILD_INTERRUPTED
        )
    if status < 0:
        return TemporaryError("The build was killed.", code=BUILD_INTERRUPTED)
    if status == layer_builder.NOT_COPIED:
        return TemporaryError(f"The layer could not be kept: {words}", code=BUILD_INTERRUPTED)
    if status == layer_builder.UNUSABLE:
        return PermanentError(f"No build can be run on this node: {words}", code=BUILD_FAILED)
    return PermanentError(f"The packages cannot be installed: {words}", code=BUILD_FAILED)
