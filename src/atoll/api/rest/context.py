"""The services that the routes call, and the answers that they write."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from atoll.api.rest import hosts
from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    from starlette.requests import Request

    from atoll.api.rest.limits import AnswerMemory, OpenStreams
    from atoll.blobs.base import Blobs
    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.service.checkpoints.service import Checkpoints
    from atoll.service.contexts.service import Contexts
    from atoll.service.events.service import Feed
    from atoll.service.executions.artifacts import Artifacts
    from atoll.service.executions.console import Consoles
    from atoll.service.executions.service import Executions
    from atoll.service.files.service import Files
    from atoll.service.files.signed_links import SignedLinks
    from atoll.service.invocations.service import Invocations
    from atoll.service.nodes.peers import Peers
    from atoll.service.nodes.placement import Placements
    from atoll.service.nodes.service import Nodes
    from atoll.service.pool.service import Pool
    from atoll.service.sessions.autosave import Autosave
    from atoll.service.sessions.clone import Clones
    from atoll.service.sessions.dependencies import Dependencies
    from atoll.service.sessions.lifecycle import Lifecycle
    from atoll.service.sessions.secrets import SessionSecrets
    from atoll.service.sessions.service import Sessions
    from atoll.service.templates.build_inputs import BuildInputs
    from atoll.service.templates.builds import Builds
    from atoll.service.templates.service import Templates
    from atoll.service.volumes.service import Volumes
    from atoll.service.webhooks.service import Webhooks
    from atoll.settings import Settings
    from atoll.stores.base import Store


@dataclass(frozen=True)
class Services:
    sessions: Sessions
    lifecycle: Lifecycle
    clones: Clones
    dependencies: Dependencies
    executions: Executions
    consoles: Consoles
    contexts: Contexts
    invocations: Invocations
    files: Files
    links: SignedLinks
    artifacts: Artifacts
    checkpoints: Checkpoints
    autosave: Autosave
    templates: Templates
    build_inputs: BuildInputs
    secrets: SessionSecrets
    volumes: Volumes
    builds: Builds
    nodes: Nodes
    placements: Placements
    peers: Peers
    feed: Feed
    webhooks: Webhooks
    pool: Pool
    store: Store
    blobs: Blobs
    coordination: Coordination
    clock: Clock
    settings: Settings
    streams: OpenStreams
    answer_memory: AnswerMemory


def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


def key_id_of(request: Request) -> str | None:
    """The id of the API key of a request; null where none is needed."""
    found: str | None = request.scope.get("atoll.key")
    return found


def absolute(request: Request, url: str) -> str:
    """An address of ours as others reach it; an error where that is not known."""
    found = absolute_or_none(request, url)
    if found is None:
        raise InvalidRequest(
            "This server does not know under which address others reach it: the request's Host is "
            "none of its own. Set ATOLL_PUBLIC_URL, or add the host to ATOLL_TRUSTED_HOSTS.",
            code="public_url_needed",
        )
    return found


def absolute_or_none(request: Request, url: str) -> str | None:
    if not url.startswith("/"):
        return url
    settings = services(request).settings
    if settings.public_url is not None:
        return settings.public_url.rstrip("/") + url
    if not hosts.is_own(request.scope, settings.trusted_hosts):
        return None
    return str(request.base_url).rstrip("/") + url


_encode = json.JSONEncoder(separators=(",", ":")).encode


def encode_json(content: Any) -> bytes:
    return _encode(content).encode("ascii")


class Answer(Response):
    """JSON, written at once: our own output needs no validation."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def shown(content: dict[str, Any], age: float | None) -> Answer:
    """An answer that says so when it is `age` seconds old, because the database is away."""
    if age is None:
        return Answer(content)
    headers = {"Age": str(int(age)), "Warning": '110 - "Response is Stale"'}
    return Answer({**content, "stale": True}, headers=headers)


def page_answer(items: list[Any], next_cursor: str | None) -> Answer:
    return Answer({"items": items, "next_cursor": next_cursor})
