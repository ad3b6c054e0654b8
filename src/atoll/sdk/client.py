"""The entry point: `AsyncAtoll`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, Unpack

from atoll.sdk.arguments import check_number
from atoll.sdk.endpoint import resolve_endpoint
from atoll.sdk.events import AsyncEvents
from atoll.sdk.executions import AsyncExecution, AsyncExecutions
from atoll.sdk.http_client import HttpClient
from atoll.sdk.interactive_help import CLIENT_ALTERNATIVES, AttributeHints, show_options
from atoll.sdk.invocations import AsyncInvocations
from atoll.sdk.nodes import AsyncNodes, AsyncPools
from atoll.sdk.pending import Pending
from atoll.sdk.sessions import AsyncSessions
from atoll.sdk.templates import AsyncTemplates
from atoll.sdk.volumes import AsyncVolumes
from atoll.sdk.webhooks import AsyncWebhooks

if TYPE_CHECKING:
    import os
    from types import TracebackType

    from atoll.sdk.options import CreateOptions
    from atoll.sdk.session import AsyncSession


class AsyncAtoll(AttributeHints):
    """
    Client of an Atoll server, or of an embedded one.

    With a `url` (or ATOLL_URL) the client uses that server. The key is `api_key`, else
    ATOLL_API_KEY, else, for a server on this machine, the key in its data directory. Without a
    URL, Atoll runs inside this process with the given `settings`.

    `timeout` limits how long the server may take to answer one request, in seconds. It does not
    limit how long code runs.
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
        check_number(timeout=timeout)
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
        """URL of the server; None if it is embedded."""
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
        """A handle for an execution with a known id. Sends no request."""
        return AsyncExecution(self._http, execution_id)

    def __repr__(self) -> str:
        return f"<Atoll at {self._http.endpoint.name}>"

    @show_options
    def session(
        self, template: str | None = None, **options: Unpack[CreateOptions]
    ) -> Pending[AsyncSession]:
        """
        Create a session. Use it with `async with`, which deletes the session at the end of the
        block. Takes the options of `sessions.create`. Without a block, delete the session yourself.
        """
        creation = self._sessions.create(template, **options)

        async def create() -> AsyncSession:
            session = await creation
            session._warns_if_unclosed = True
            return session

        return Pending("atoll.session", create())

    async def open(self) -> None:
        """Connect, or start the embedded server. The first request does this automatically."""
        await self._http.open()

    async def close(self) -> None:
        """Close all connections. An embedded server stops, and its sessions end."""
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
