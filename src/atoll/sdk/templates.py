"""Templates: what sessions start from."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Unpack

from atoll.errors import PermanentError, TemporaryError
from atoll.model.image import parse
from atoll.sdk.arguments import encode
from atoll.sdk.decode import decode
from atoll.sdk.http_client import new_key
from atoll.sdk.interactive_help import show_options
from atoll.sdk.options import TEMPLATE_FIELDS
from atoll.sdk.paths import url_segment
from atoll.sdk.retry import Backoff
from atoll.sdk.sse import READ_TIMEOUT, messages
from atoll.sdk.values import BuildEvent, TemplateInfo

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Mapping

    from atoll.sdk.http_client import HttpClient
    from atoll.sdk.options import TemplateOptions
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
_LIMITS = ("cpu", "memory", "disk", "max_processes")
_PIECE = 1024 * 1024
_UPLOAD_TIMEOUT = 600.0
"""Seconds beyond the usual timeout for uploading build files."""


class AsyncTemplates:
    """All templates of the server."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    @show_options
    async def create(
        self, name: str, *, template_id: str | None = None, **options: Unpack[TemplateOptions]
    ) -> TemplateInfo:
        """
        Create a template.

        On nodes that run sandboxes themselves, `image` is a root file system directory on the node
        and `python` its interpreter. `debian_packages` and `python_packages` are installed on
        `base_image`: a root file system directory, `template:` and another template's id, or
        nothing for the node's own Python.

        On nodes with Docker, `image` is the name of an image, or `dockerfile` is the text of a
        Dockerfile and `context` a local directory with the files that it copies. Files that its
        `.dockerignore` excludes are not sent. `registry` has the credentials for pulling:
        `username` and `password`, or `identity_token`; with a Dockerfile also the `server`.
        `runtime` is an OCI runtime such as `runsc`.

        `preload` are modules that the interpreter imports before code arrives. `pool_size` and
        `pool_max` are the minimum and maximum number of ready instances. `require` is the isolation
        that a node must provide. `cpu`, `memory`, `disk` and `max_processes` are the default limits
        of sessions.

        Building takes time: see `wait_ready`.
        """
        body = {"name": name, **await self._body(options, call="templates.create")}
        if template_id is not None:
            body["id"] = template_id
        answer = await self._http.call_once("templates", key=new_key(), body=body)
        return decode(TemplateInfo, answer)

    async def get(self, template_id: str) -> TemplateInfo:
        return await self._http.fetch(TemplateInfo, "GET", f"templates/{url_segment(template_id)}")

    def list(self) -> AsyncIterator[TemplateInfo]:
        return self._http.items(TemplateInfo, "templates")

    @show_options
    async def update(
        self, template_id: str, *, name: str | None = None, **options: Unpack[TemplateOptions]
    ) -> TemplateInfo:
        """
        Change the given options and keep the others, as a new version. Existing sessions keep
        theirs.
        """
        path = f"templates/{url_segment(template_id)}"
        stored = await self._http.call("GET", path)
        changes = await self._body(options, call="templates.update")
        limits = stored["default_resources"] | changes.pop("default_resources", {})
        body = {key: value for key, value in stored.items() if key not in _READ_ONLY} | changes
        image = options.get("image")
        kept_registry = body.get("registry") if "registry" not in changes else None
        if image is not None and not _serves(kept_registry, image):
            del body["registry"]  # Credentials must not go to another image's registry.
        body |= {"default_resources": limits, "name": stored["name"] if name is None else name}
        # Not repeatable: each request creates a version.
        return await self._http.fetch(TemplateInfo, "PUT", path, body=body, once=False)

    async def _body(self, options: TemplateOptions, *, call: str) -> dict[str, Any]:
        body = encode(options, TEMPLATE_FIELDS, call=call, keep_empty=True)
        if limits := {name: body.pop(name) for name in _LIMITS if name in body}:
            body["default_resources"] = limits
        if "build_context" in body:
            body["build_context"] = await self.send_context(body["build_context"])
        return body

    async def send_context(self, source: str | os.PathLike[str]) -> str:
        """
        Upload a local directory for Dockerfiles to copy from, and return its digest. Files that
        its `.dockerignore` excludes are not sent.
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
                body=_pieces(file),
                headers={"content-type": "application/x-tar"},
                wait=_UPLOAD_TIMEOUT,
            )
        return digest

    def versions(self, template_id: str) -> AsyncIterator[TemplateInfo]:
        """Versions of the template, newest first."""
        return self._http.items(TemplateInfo, f"templates/{url_segment(template_id)}/versions")

    async def version(self, template_id: str, number: int) -> TemplateInfo:
        path = f"templates/{url_segment(template_id)}/versions/{int(number)}"
        return await self._http.fetch(TemplateInfo, "GET", path)

    async def build(self, template_id: str) -> TemplateInfo:
        """Rebuild the template as a new version, with the current packages."""
        path = f"templates/{url_segment(template_id)}/build"
        return await self._http.fetch(TemplateInfo, "POST", path)

    async def log(self, template_id: str, version: int | None = None) -> str:
        """The end of the build output of the newest, or another, version."""
        path = f"templates/{url_segment(template_id)}/log"
        async with self._http.stream("GET", path, query={"version": version}) as response:
            return (await response.aread()).decode("utf-8", "replace")

    async def follow(
        self, template_id: str, version: int | None = None
    ) -> AsyncIterator[BuildEvent]:
        """Output and status changes of a build. Ends with the build."""
        path = f"templates/{url_segment(template_id)}/log"
        seen, ended = 0, False
        backoff = Backoff()
        while not ended:
            skip = seen
            try:
                async with self._http.stream(
                    "GET", path, query={"version": version, "follow": True}, wait=READ_TIMEOUT
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
                    raise TemporaryError(
                        f"The build log of {template_id} was interrupted.", code="stream_cut"
                    )
            except TemporaryError as error:
                if not ended:
                    await backoff.wait_or_raise(error)

    async def wait_ready(self, template_id: str, timeout: float | None = None) -> TemplateInfo:
        """
        Wait for the build. Raises `PermanentError` with the code `build_failed` if it fails, and
        `TimeoutError` after `timeout` seconds.
        """
        async with asyncio.timeout(timeout):
            async for _ in self.follow(template_id):
                pass
            template = await self.get(template_id)
        if template.status == "failed":
            raise PermanentError(
                f"Building template {template_id} failed: {template.message}",
                code="build_failed",
            )
        return template

    async def delete(self, template_id: str) -> None:
        await self._http.call("DELETE", f"templates/{url_segment(template_id)}")


def _serves(registry: Mapping[str, str] | None, image: str) -> bool:
    """Whether credentials, if any, are for the registry of an image."""
    try:
        return registry is None or registry["server"] == parse(image).server
    except ValueError:
        return True  # Not an image name; the server reports that.


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
