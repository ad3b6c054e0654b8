"""The way in: `AsyncAtoll`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from atoll.sdk.arguments import check_numbers
from atoll.sdk.attribute_hints import CLIENT_ALTERNATIVES, AttributeHints
from atoll.sdk.endpoint import resolve_endpoint
from atoll.sdk.events import AsyncEvents
from atoll.sdk.executions import AsyncExecution, AsyncExecutions
from atoll.sdk.http_client import HttpClient
from atoll.sdk.invocations import AsyncInvocations
from atoll.sdk.nodes import AsyncNodes
from atoll.sdk.pending import Pending
from atoll.sdk.pools import AsyncPools
from atoll.sdk.sessions import AsyncSessions
from atoll.sdk.templates import AsyncTemplates
from atoll.sdk.volumes import AsyncVolumes
from atoll.sdk.webhooks import AsyncWebhooks

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from atoll.sdk.session import AsyncSession
    from atoll.sdk.values import Mount


class AsyncAtoll(AttributeHints):
    """
    Sandboxes, of a server or of this process.

    With a `url` (or ATOLL_URL) it speaks to that server, with `api_key` (or ATOLL_API_KEY, or for
    a server on this machine the key in its data directory). Without, it runs the whole of Atoll
    inside this process, and `settings` are that one's settings. `timeout` is how long the
    server may take to answer one request, in seconds; it does not limit how long code runs.
    """

    ALTERNATIVES = CLIENT_ALTERNATIVES

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        timeout: float = 30.0,
        **settings: Any,
    ) -> None:
        check_numbers(timeout=timeout)
        self._http = HttpClient(resolve_endpoint(url, api_key, data_dir, settings), timeout)
        self._sessions = AsyncSessions(self._http)
        self._templates = AsyncTemplates(self._http)
        self._volumes = AsyncVolumes(self._http)
        self._nodes = AsyncNodes(self._http)
        self._pools = AsyncPools(self._http)
        self._executions = AsyncExecutions(self._http)
        self._invocations = AsyncInvocations(self._http)
        self._events = AsyncEvents(self._http)
        self._webhooks = AsyncWebhooks(self._http)

    @property
    def url(self) -> str | None:
        """The server's address; none when it is this process."""
        return self._http.endpoint.url

    @property
    def sessions(self) -> AsyncSessions:
        return self._sessions

    @property
    def executions(self) -> AsyncExecutions:
        return self._executions

    @property
    def invocations(self) -> AsyncInvocations:
        return self._invocations

    @property
    def templates(self) -> AsyncTemplates:
        return self._templates

    @property
    def volumes(self) -> AsyncVolumes:
        return self._volumes

    @property
    def nodes(self) -> AsyncNodes:
        return self._nodes

    @property
    def events(self) -> AsyncEvents:
        return self._events

    @property
    def webhooks(self) -> AsyncWebhooks:
        return self._webhooks

    @property
    def pools(self) -> AsyncPools:
        return self._pools

    def execution(self, execution_id: str) -> AsyncExecution:
        """The handle of an execution known by its id; the server is not asked."""
        return AsyncExecution(self._http, execution_id)

    def __repr__(self) -> str:
        return f"<Atoll at {self._http.endpoint.name}>"

    def session(
        self,
        template: str | None = None,
        *,
        timeout: int | None = None,
        cpu: str | float | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        max_processes: int | None = None,
        env: Mapping[str, str] | None = None,
        capacity: int | None = None,
        dependencies: Sequence[str | Mapping[str, str]] = (),
        install_timeout: int | None = None,
        allow_version_conflicts: bool | None = None,
        secrets: Mapping[str, str] | None = None,
        volumes: Sequence[Mount] = (),
        workspace_mode: str | None = None,
        durability: str | None = None,
        started_from: str | None = None,
        labels: Mapping[str, str] | None = None,
        auto_start: bool | None = None,
        idle_timeout: int | None = None,
        archive_after: int | None = None,
        delete_after: int | None = None,
    ) -> Pending[AsyncSession]:
        """
        A session for the length of an `async with`; see `sessions.create` for the arguments.
        Without a block, delete it yourself.
        """
        creating = self._sessions.create(
            template,
            timeout=timeout,
            cpu=cpu,
            memory=memory,
            disk=disk,
            max_processes=max_processes,
            env=env,
            capacity=capacity,
            dependencies=dependencies,
            install_timeout=install_timeout,
            allow_version_conflicts=allow_version_conflicts,
            secrets=secrets,
            volumes=volumes,
            workspace_mode=workspace_mode,
            durability=durability,
            started_from=started_from,
            labels=labels,
            auto_start=auto_start,
            idle_timeout=idle_timeout,
            archive_after=archive_after,
            delete_after=delete_after,
        )

        async def make() -> AsyncSession:
            return (await creating)._expect_close()

        return Pending("atoll.session", make())

    async def open(self) -> None:
        """Start what has to be started; the first request does it too."""
        await self._http.open()

    async def close(self) -> None:
        """Let go of the server; an embedded one ends, and its sessions with it."""
        await self._http.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
