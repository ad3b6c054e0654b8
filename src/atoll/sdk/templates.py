"""Templates: what sessions start from."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from atoll.errors import PermanentError, TemporaryError
from atoll.model.image import parse
from atoll.sdk.arguments import (
    check_limits,
    check_numbers,
    check_string,
    check_string_dict,
    check_string_list,
)
from atoll.sdk.decode import decode
from atoll.sdk.paths import url_segment
from atoll.sdk.retry import Backoff, new_key
from atoll.sdk.sse import messages
from atoll.sdk.values import BuildEvent, TemplateInfo

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Mapping, Sequence

    from atoll.sdk.http_client import HttpClient
    from atoll.sdk.tar_pack import TarPacker

_READ_ONLY = (
    "id",
    "version",
    "status",
    "message",
    "attempts",
    "installed_packages",
    "pre_installed_packages",
    "image_digest",
    "entrypoint",
    "command",
    "created_at",
    "updated_at",
)
_PIECE = 1024 * 1024
_CONTEXT_WAIT = 600.0
"""Seconds for which a server may be busy with a context beyond what one answer may take."""
_READ_TIMEOUT = 45.0
"""Seconds without an event or a ping after which a line counts as dead; pings come every 15."""


class AsyncTemplates:
    """All templates of the server."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def create(
        self,
        name: str,
        *,
        template_id: str | None = None,
        image: str | None = None,
        base_image: str | None = None,
        python: str | None = None,
        preload: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        pool_size: int | None = None,
        pool_max: int | None = None,
        cpu: str | float | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        max_processes: int | None = None,
        require: Sequence[str] | None = None,
        debian_packages: Sequence[str] | None = None,
        python_packages: Sequence[str] | None = None,
        runtime: str | None = None,
        dockerfile: str | None = None,
        context: str | os.PathLike[str] | None = None,
        registry: Mapping[str, str] | None = None,
    ) -> TemplateInfo:
        """
        A new template.

        `image` is a root file system directory on the node, `python` the interpreter, `preload` the
        modules it has imported before code arrives, `pool_size` and `pool_max` how many instances
        are kept ready at least and, when many are asked for, at most, `require` what a node must be
        able to give. `debian_packages` and `python_packages` are installed on `base_image`: a root
        file system directory, `template:` and another template's id, or nothing for the node's own
        Python. That takes a while: see `wait_ready`.

        Where sessions are made by Docker, `image` is the name of an image, or `dockerfile` the text
        of a Dockerfile, and `context` a directory of this machine that it copies from; what its
        `.dockerignore` leaves out is not sent. `registry` has the credentials for pulling:
        `username` and `password`, or `identity_token`, and with a Dockerfile the `server`.
        `runtime` is an OCI runtime such as `runsc`.
        """
        body = {"name": name, "id": template_id}
        changes = _changes(
            image, base_image, python, preload, env, pool_size, pool_max,
            require, debian_packages, python_packages, runtime, dockerfile, registry,
        )  # fmt: skip
        if context is not None:
            changes["build_context"] = await self.send_context(context)
        limits = _limits(cpu, memory, disk, max_processes)
        body |= changes | ({"default_resources": limits} if limits else {})
        given = {name: value for name, value in body.items() if value is not None}
        answer = await self._http.call_once("templates", key=new_key(), body=given)
        return decode(TemplateInfo, answer)

    async def get(self, template_id: str) -> TemplateInfo:
        answer = await self._http.call("GET", f"templates/{url_segment(template_id)}")
        return decode(TemplateInfo, answer)

    async def list(self) -> AsyncIterator[TemplateInfo]:
        async for item in self._http.pages("templates"):
            yield decode(TemplateInfo, item)

    async def update(
        self,
        template_id: str,
        *,
        name: str | None = None,
        image: str | None = None,
        base_image: str | None = None,
        python: str | None = None,
        preload: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        pool_size: int | None = None,
        pool_max: int | None = None,
        cpu: str | float | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        max_processes: int | None = None,
        require: Sequence[str] | None = None,
        debian_packages: Sequence[str] | None = None,
        python_packages: Sequence[str] | None = None,
        runtime: str | None = None,
        dockerfile: str | None = None,
        context: str | os.PathLike[str] | None = None,
        registry: Mapping[str, str] | None = None,
    ) -> TemplateInfo:
        """
        Change what is given and keep the rest, as a new version; sessions that exist already keep
        theirs.
        """
        path = f"templates/{url_segment(template_id)}"
        stored = await self._http.call("GET", path)
        body = {key: value for key, value in stored.items() if key not in _READ_ONLY}
        changes = _changes(
            image, base_image, python, preload, env, pool_size, pool_max,
            require, debian_packages, python_packages, runtime, dockerfile, registry,
        )  # fmt: skip
        if context is not None:
            changes["build_context"] = await self.send_context(context)
        body |= {key: value for key, value in changes.items() if value is not None}
        if image is not None and registry is None and not _serves(body.get("registry"), image):
            del body["registry"]  # Those of the image before are not for another's server.
        body["default_resources"] = {
            **stored["default_resources"],
            **_limits(cpu, memory, disk, max_processes),
        }
        body["name"] = stored["name"] if name is None else name
        # Not repeated: each is another version.
        answer = await self._http.call("PUT", path, body=body, once=False)
        return decode(TemplateInfo, answer)

    async def send_context(self, source: str | os.PathLike[str]) -> str:
        """
        Send a directory of this machine for Dockerfiles to copy from, and tell its digest. What
        its `.dockerignore` leaves out is not sent.
        """
        from atoll.sdk import dockerignore
        from atoll.sdk.tar_pack import TarPacker

        top = Path(source)
        with await asyncio.to_thread(tempfile.TemporaryFile) as file:
            packer = TarPacker(top, await asyncio.to_thread(dockerignore.read, top))
            digest = await asyncio.to_thread(_pack, packer, file)
            await self._http.call(
                "PUT",
                f"build-contexts/{digest}",
                content=_pieces(file),
                headers={"content-type": "application/x-tar"},
                wait=_CONTEXT_WAIT,
            )
        return digest

    async def versions(self, template_id: str) -> AsyncIterator[TemplateInfo]:
        """What it is and was, newest first."""
        async for item in self._http.pages(f"templates/{url_segment(template_id)}/versions"):
            yield decode(TemplateInfo, item)

    async def version(self, template_id: str, number: int) -> TemplateInfo:
        path = f"templates/{url_segment(template_id)}/versions/{int(number)}"
        return decode(TemplateInfo, await self._http.call("GET", path))

    async def build(self, template_id: str) -> TemplateInfo:
        """Build the same again as a new version, with the packages that there are now."""
        path = f"templates/{url_segment(template_id)}/build"
        return decode(TemplateInfo, await self._http.call("POST", path))

    async def log(self, template_id: str, version: int | None = None) -> str:
        """What the build of the newest version, or of another, has printed: its end."""
        path = f"templates/{url_segment(template_id)}/log"
        async with self._http.stream("GET", path, query={"version": version}) as response:
            return (await response.aread()).decode("utf-8", "replace")

    async def follow(
        self, template_id: str, version: int | None = None
    ) -> AsyncIterator[BuildEvent]:
        """What a build prints, and how it goes, as it happens; ends with the build."""
        path = f"templates/{url_segment(template_id)}/log"
        seen, ended = 0, False
        backoff = Backoff()
        while not ended:
            skip = seen
            try:
                async with self._http.stream(
                    "GET", path, query={"version": version, "follow": True}, wait=_READ_TIMEOUT
                ) as response:
                    async for message in messages(response.aiter_raw()):
                        backoff.reset()
                        event = decode(BuildEvent, json.loads(message.data))
                        if event.text is not None:
                            text = event.text[skip:]
                            skip = max(0, skip - len(event.text))
                            seen += len(text)
                            event = replace(event, text=text)
                        ended = event.status in ("ready", "failed")
                        if event.text != "":
                            yield event
                if not ended:
                    raise TemporaryError(f"The log of {template_id} was cut.", code="stream_cut")
            except TemporaryError as error:
                if not ended:
                    await backoff.wait_or_raise(error)

    async def wait_ready(self, template_id: str, timeout: float | None = None) -> TemplateInfo:
        """
        The template once its build has ended well. Raises `PermanentError` with code `build_failed`
        when it has not, and `TimeoutError` when that takes longer than `timeout` seconds.
        """
        async with asyncio.timeout(timeout):
            async for _ in self.follow(template_id):
                pass
            template = await self.get(template_id)
        if template.status == "failed":
            raise PermanentError(
                f"Template {template_id} could not be built: {template.message}",
                code="build_failed",
            )
        return template

    async def delete(self, template_id: str) -> None:
        await self._http.call("DELETE", f"templates/{url_segment(template_id)}")


def _changes(
    image: str | None,
    base_image: str | None,
    python: str | None,
    preload: Sequence[str] | None,
    env: Mapping[str, str] | None,
    pool_size: int | None,
    pool_max: int | None,
    require: Sequence[str] | None,
    debian_packages: Sequence[str] | None,
    python_packages: Sequence[str] | None,
    runtime: str | None,
    dockerfile: str | None,
    registry: Mapping[str, str] | None,
) -> dict[str, Any]:
    check_string(image=image, base_image=base_image, python=python, runtime=runtime)
    check_string(dockerfile=dockerfile)
    check_string_list(preload=preload, require=require)
    check_string_list(debian_packages=debian_packages, python_packages=python_packages)
    check_string_dict(env=env, registry=registry)
    check_numbers(pool_size=pool_size, pool_max=pool_max)
    return {
        "image": image,
        "base_image": base_image,
        "python": python,
        "preload": None if preload is None else list(preload),
        "env": None if env is None else dict(env),
        "pool_size": pool_size,
        "pool_max": pool_max,
        "debian_packages": None if debian_packages is None else list(debian_packages),
        "python_packages": None if python_packages is None else list(python_packages),
        "runtime": runtime,
        "dockerfile": dockerfile,
        "registry": None if registry is None else dict(registry),
        "security_context": None if require is None else {"require": list(require)},
    }


def _serves(registry: Mapping[str, str] | None, image: str) -> bool:
    """Whether credentials, if there are any, are for the registry of an image."""
    try:
        return registry is None or registry["server"] == parse(image).server
    except ValueError:
        return True  # It is no image by name, which the server has a word for.


def _pack(packer: TarPacker, file: IO[bytes]) -> str:
    found = hashlib.sha256()
    for piece in packer:
        found.update(piece)
        file.write(piece)
    file.seek(0)
    return found.hexdigest()


async def _pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, _PIECE):
        yield piece


def _limits(
    cpu: str | float | None,
    memory: str | int | None,
    disk: str | int | None,
    max_processes: int | None,
) -> dict[str, Any]:
    check_limits(cpu=cpu, memory=memory, disk=disk, max_processes=max_processes)
    limits = {
        "cpu": None if cpu is None else str(cpu),
        "memory": None if memory is None else str(memory),
        "disk": None if disk is None else str(disk),
        "max_processes": max_processes,
    }
    return {name: value for name, value in limits.items() if value is not None}
