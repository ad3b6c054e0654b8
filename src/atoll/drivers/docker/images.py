"""
Images of one engine: what is there, pulled, built and let go.

What Atoll needs is held by a name of its own, `atoll/<node>:<name>`, so that neither a tag that
moves nor a prune takes it away, and so that it is known what may go. A name that a pull brought is
given up for it; one that was there before is somebody else's and stays.

Cancelled, a pull or a build ends with its request: the engine notices that nobody listens.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import posixpath
import re
import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import structlog
from aiodocker.exceptions import DockerError

from atoll.drivers.docker.build_tar import packed
from atoll.drivers.docker.engine import (
    NO_SPACE,
    UNAVAILABLE,
    UNREACHABLE,
    LineTooLong,
    lines,
    translated,
)
from atoll.drivers.docker.labels import Label
from atoll.drivers.docker.progress import Progress
from atoll.errors import AtollError, NodeFull, PermanentError, TemporaryError
from atoll.model.image import HUB, parse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from datetime import timedelta
    from pathlib import Path

    from atoll.drivers.base import BuildContext, RegistryAuth
    from atoll.drivers.docker.engine import Engine
    from atoll.settings import DockerSettings

    Say = Callable[[bytes], None]

log = structlog.get_logger(__name__)

FRESH_SECONDS = 1.0
"""How long it is remembered what a name stands for: a tag can move."""
MOST_REMEMBERED = 1000
OWN = "atoll"
"""The repositories by which images are held are beneath it, one for each node."""
HUB_KEY = "https://index.docker.io/v1/"
"""What the engine calls the registry of names that name none."""
PROBE = "atoll-probe-"
NAMES = ("python3", "python")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_CONFIG = 256 * 1024
"""
Bytes of an image's configuration. The engine repeats the labels with each container of the image,
whenever it lists containers.
"""
MAX_PLACES = 64
"""Directories of an image's PATH in which an interpreter is looked for."""
LAST_LINES = 20
"""Of what a build printed, in the error."""
BUILD_FAILED = "build_failed"

_TYPE_BITS, _LINK_BIT = 0x8F280000, 1 << 27
"""Of a mode as the engine tells it: what is not a plain file has one of them; a link, this one."""
_DENIED = ("unauthorized", "denied", "no basic auth", "authentication required", "forbidden")
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_AWAY = ("dial tcp", "net/http", "tls handshake", "toomanyrequests", "unexpected http status: 5")
_NOT_FOUND = ("not found", "manifest unknown", "name unknown", "no matching manifest")


@dataclass(frozen=True, slots=True)
class Image:
    """What an image says of itself."""

    id: str
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    volumes: tuple[str, ...] = ()
    """Paths for which it wants volumes."""
    size: int = 0
    """Bytes."""
    digests: tuple[str, ...] = ()
    """Names with the digests of its manifests, of the registries that it came from."""
    tags: tuple[str, ...] = ()
    """All its names."""
    config_size: int = 0
    """Bytes of its configuration: labels, environment and the like."""


class Images:
    def __init__(self, engine: Engine, settings: DockerSettings, node: str) -> None:
        """`node` tells the nodes on one engine apart; lower case."""
        self._engine = engine
        self._settings = settings
        self._node = node
        self._known: dict[str, tuple[float, Image | None]] = {}
        self._pythons: dict[tuple[str, str], str | None] = {}

    # What is there

    async def find(self, name: str) -> Image | None:
        """The image of a name or id, as it was at most a second ago."""
        known = self._known.get(name)
        if known is not None and time.monotonic() - known[0] < FRESH_SECONDS:
            return known[1]
        with translated():
            try:
                found: Image | None = _image(await self._engine.docker.images.inspect(name))
            except DockerError as error:
                if error.status != 404:
                    raise
                found = None
        if len(self._known) >= MOST_REMEMBERED:
            self._known.clear()
        self._known[name] = (time.monotonic(), found)
        return found

    async def python(self, image: Image, wanted: str = "") -> str | None:
        """
        Where an interpreter is inside: `wanted`, a path or a name, or what the image's PATH has;
        none when it is not there. Nothing of the image is run.
        """
        key = (image.id, wanted)
        if key not in self._pythons:
            self._pythons[key] = await self._look_for(image, wanted)
        return self._pythons[key]

    async def _look_for(self, image: Image, wanted: str) -> str | None:
        names = (wanted,) if wanted else NAMES
        places = [part for part in image.env.get("PATH", DEFAULT_PATH).split(":") if part]
        paths = [wanted] if wanted.startswith("/") else _joined(places[:MAX_PLACES], names)
        with translated():
            async with self._probe(image) as container:
                for path in paths:
                    if await self._is_program(container, path):
                        return path
                await self._insist_on(container)
        return None

    async def _insist_on(self, container: str) -> None:
        """What is not found in a container that somebody has removed may be in the image."""
        try:
            await self._engine.docker.containers.container(container).show()
        except DockerError as error:
            if error.status != 404:
                raise
            raise TemporaryError(
                "An image was not looked into to its end: the container for that was removed.",
                code=UNAVAILABLE,
            ) from error

    @contextlib.asynccontextmanager
    async def _probe(self, image: Image) -> AsyncIterator[str]:
        """A container to look into, which is never started."""
        config: dict[str, Any] = {
            "Image": image.id,
            "Entrypoint": ["-"],
            "Labels": {Label.PROBE: self._node},
            "HostConfig": {"NetworkMode": "none"},
        }
        # To its end: one that is made and not known would stay.
        name = f"{PROBE}{secrets.token_hex(8)}"
        making = asyncio.ensure_future(self._engine.docker.containers.create(config, name=name))
        try:
            container = await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait([making])
            if not making.cancelled() and making.exception() is None:
                await self._remove_container(making.result().id)
            raise
        try:
            yield container.id
        finally:
            await asyncio.shield(self._remove_container(container.id))

    async def _remove_container(self, container: str) -> None:
        try:
            await self._engine.docker.containers.container(container).delete(force=True, v=True)
        except (DockerError, aiohttp.ClientError, TimeoutError, OSError) as error:
            # `remove_probes` finds it.
            log.info("docker.probe_left", container=container[:12], error=str(error))

    async def _is_program(self, container: str, path: str) -> bool:
        for _ in range(2):
            stat = await self._stat(container, path)
            if stat is None:
                return False
            mode, target = int(stat["mode"]), str(stat.get("linkTarget") or "")
            if not mode & _LINK_BIT:
                return not mode & _TYPE_BITS and bool(mode & 0o111)
            path = target  # The end of the chain of links, inside.
        return False

    async def _stat(self, container: str, path: str) -> dict[str, Any] | None:
        docker = self._engine.docker
        # Not by aiodocker's own way, which reads a body with every error.
        url = docker._canonicalize_url(f"containers/{container}/archive")
        async with docker.session.head(url, params={"path": path}) as response:
            if response.status == 404:
                return None
            if response.status != 200:
                raise DockerError(response.status, f"{path} cannot be looked at")
            told = response.headers["X-Docker-Container-Path-Stat"]
        found: dict[str, Any] = json.loads(base64.b64decode(told))
        return found

    async def remove_probes(self) -> None:
        """Remove containers that were looked into by a process that is gone."""
        labels = [f"{Label.PROBE}={self._node}"]
        with translated():
            left = await self._engine.docker.containers.list(all=True, filters={"label": labels})
            for container in left:
                # By its name too, which is ours to give: labels come with images.
                if any(name.startswith(f"/{PROBE}") for name in container["Names"] or ()):
                    await self._remove_container(container.id)

    # What is held

    def held_as(self, name: str) -> str:
        return f"{OWN}/{self._node}:{name}"

    async def held(self, name: str) -> Image | None:
        return await self.find(self.held_as(name))

    async def hold(self, image_id: str, name: str) -> None:
        with translated():
            await self._engine.docker.images.tag(image_id, f"{OWN}/{self._node}", tag=name)
        self._known.clear()  # Each of its names tells of the others.

    async def held_by_others(self, name: str) -> Image | None:
        """What another node on this engine holds by the same name."""
        with translated():
            found = await self._engine.docker.images.list(
                filters={"reference": [f"{OWN}/*:{name}"]}
            )
        return await self.find(str(found[0]["Id"])) if found else None

    async def names_held(self) -> list[str]:
        repository = f"{OWN}/{self._node}"
        with translated():
            found = await self._engine.docker.images.list(
                filters={"reference": [f"{repository}:*"]}
            )
        tags = [tag for image in found for tag in image.get("RepoTags") or ()]
        return sorted(tag.rpartition(":")[2] for tag in tags if tag.startswith(f"{repository}:"))

    async def let_go(self, name: str) -> bool:
        """Give up a name, and the image with its last one; false while a container has it."""
        return await self._untag(self.held_as(name))

    async def _untag(self, name: str) -> bool:
        self._known.pop(name, None)
        with translated():
            try:
                await self._engine.docker.images.delete(name)
            except DockerError as error:
                if error.status == 409:
                    return False
                if error.status != 404:
                    raise
        return True

    # What is brought

    async def pull(
        self, reference: str, auth: RegistryAuth | None, *, timeout: timedelta, say: Say
    ) -> Image:
        """
        Raises `PermanentError` with code `image_not_found` or `image_denied`, or `TemporaryError`
        with code `registry_unavailable`.
        """
        wanted = parse(reference)
        if auth is not None and auth.server != wanted.server:
            auth = None  # The engine would give them to whichever server the image is of.
        params = {"fromImage": wanted.name, "tag": wanted.wanted}
        headers = {} if auth is None else {"X-Registry-Auth": _encoded(_credentials(auth))}
        progress = Progress()
        async with _within(timeout, f"{reference} was not pulled"):
            with translated():
                try:
                    async for message in self._messages("images/create", params, headers):
                        if "error" in message:
                            raise pull_error(reference, _error(message))
                        if text := progress.text(message):
                            say(text.encode("utf-8", "replace"))
                except DockerError as error:
                    if error.status == UNREACHABLE:
                        raise
                    raise pull_error(reference, str(error.message)) from None
            self._known.pop(reference, None)
            found = await self.find(reference)
        if found is None:
            raise TemporaryError(
                f"{reference} was pulled, and is not there.", code="registry_unavailable"
            )
        return found

    async def bring(
        self, reference: str, name: str, auth: RegistryAuth | None, *, timeout: timedelta, say: Say
    ) -> Image:
        """Pull an image and hold it, without leaving a name behind that was not there before."""
        others = await self.find(reference) is not None
        found = await self.pull(reference, auth, timeout=timeout, say=say)
        await self.hold(found.id, name)
        if not others:
            await self._untag(reference)
        return found

    async def build(
        self,
        dockerfile: str,
        context: BuildContext | None,
        name: str,
        *,
        args: Mapping[str, str],
        auth: RegistryAuth | None,
        anew: bool,
        scratch: Path,
        timeout: timedelta,
        say: Say,
    ) -> None:
        """
        Make the image `name` from a Dockerfile; with `anew`, whatever was built before. Raises
        `PermanentError` with code `build_failed` or `build_context_invalid`, or `TemporaryError`
        with code `registry_unavailable` while the image that it begins with cannot be had.
        """
        memory = str(self._settings.build_memory)
        params = {
            "t": self.held_as(name),
            "rm": "1",
            "forcerm": "1",
            "networkmode": self._settings.build_network,
            "memory": memory,
            "memswap": memory,
            "buildargs": json.dumps(dict(args)),
            "labels": json.dumps({Label.BUILT_BY: self._node}),
        }
        if anew:
            params |= {"pull": "1", "nocache": "1"}
        headers = {"Content-Type": "application/x-tar"}
        if auth is not None:
            server = HUB_KEY if auth.server == HUB else auth.server
            headers["X-Registry-Config"] = _encoded({server: _credentials(auth)})
        progress, last = Progress(), deque[str](maxlen=LAST_LINES)
        async with (
            _within(timeout, "The image was not built"),
            packed(dockerfile, context, scratch) as data,
        ):
            with translated():
                try:
                    async for message in self._messages("build", params, headers, data):
                        if "error" in message:
                            raise _build_error(_error(message), last)
                        if text := progress.text(message):
                            last.extend(line for line in text.splitlines() if line.strip())
                            say(text.encode("utf-8", "replace"))
                except DockerError as error:
                    if error.status == UNREACHABLE:
                        raise
                    raise _build_error(str(error.message), last) from None
        self._known.pop(self.held_as(name), None)

    async def _messages(
        self,
        path: str,
        params: Mapping[str, str],
        headers: Mapping[str, str],
        data: AsyncIterator[bytes] | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """Those of a request that may take long; who cannot wait has a time-out around it."""
        patience = aiohttp.ClientTimeout(
            total=None, sock_connect=self._settings.timeout.total_seconds()
        )
        async with self._engine.docker._query(
            path, "POST", params=dict(params), data=data, headers=headers, timeout=patience
        ) as response:
            try:
                async for line in lines(response):
                    yield json.loads(line)
            except LineTooLong:
                raise PermanentError(
                    "A command of the Dockerfile prints a line without end.", code=BUILD_FAILED
                ) from None
            finally:
                # Not given back to be used again: what is not read yet ends with it.
                response.close()


@contextlib.asynccontextmanager
async def _within(timeout: timedelta, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout.total_seconds()):
            yield
    except TimeoutError:
        raise PermanentError(f"{what} in {timeout}.", code=BUILD_FAILED) from None


def pull_error(reference: str, words: str) -> AtollError:
    """What an engine says of a pull that failed, as an error of ours."""
    lowered = words.lower()
    if NO_SPACE in lowered:
        return NodeFull(f"The Docker engine: {words}")
    if any(part in lowered for part in _DENIED):
        return PermanentError(
            f"{reference} may not be pulled: {words}. Give the template the registry's credentials "
            "(registry), if it has any.",
            code="image_denied",
        )
    if any(part in lowered for part in _NOT_FOUND):
        return PermanentError(f"There is no image {reference}: {words}.", code="image_not_found")
    return TemporaryError(
        f"The registry of {reference} cannot be reached: {words}", code="registry_unavailable"
    )


def _build_error(words: str, last: deque[str]) -> AtollError:
    lowered = words.lower()
    if NO_SPACE in lowered:
        return NodeFull(f"The Docker engine: {words}")
    of_command = lowered.startswith("the command ")
    if not of_command and any(part in lowered for part in _AWAY):
        return TemporaryError(
            f"The registry of the Dockerfile's base cannot be reached: {words}",
            code="registry_unavailable",
        )
    said = _COLOUR.sub("", "\n".join([*last, words]))
    return PermanentError(f"The Dockerfile cannot be built: {said}", code=BUILD_FAILED)


def _error(message: dict[str, Any]) -> str:
    detail = message.get("errorDetail")
    words = detail.get("message") if isinstance(detail, dict) else None
    return str(words or message["error"])


def _credentials(auth: RegistryAuth) -> dict[str, str]:
    server = HUB_KEY if auth.server == HUB else auth.server
    if auth.identity_token:
        return {"identitytoken": auth.identity_token, "serveraddress": server}
    return {"username": auth.username, "password": auth.password, "serveraddress": server}


def _encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


def _joined(places: list[str], names: tuple[str, ...]) -> list[str]:
    return [posixpath.join(place, name) for name in names for place in places]


def _image(told: Mapping[str, Any]) -> Image:
    config = told.get("Config") or {}
    env = [each.partition("=") for each in config.get("Env") or ()]
    return Image(
        id=str(told["Id"]),
        entrypoint=tuple(config.get("Entrypoint") or ()),
        cmd=tuple(config.get("Cmd") or ()),
        env={name: value for name, _, value in env},
        user=config.get("User") or "",
        workdir=config.get("WorkingDir") or "",
        volumes=tuple(config.get("Volumes") or ()),
        size=int(told.get("Size") or 0),
        digests=tuple(told.get("RepoDigests") or ()),
        tags=tuple(told.get("RepoTags") or ()),
        config_size=len(json.dumps(config)),
    )
