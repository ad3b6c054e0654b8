"""Create, find and delete sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from atoll.sdk.arguments import check_string, encode
from atoll.sdk.decode import decode
from atoll.sdk.dependencies import INSTALL_TIMEOUT
from atoll.sdk.interactive_help import show_options
from atoll.sdk.options import CREATE_FIELDS
from atoll.sdk.paths import url_segment
from atoll.sdk.pending import Pending
from atoll.sdk.retry import undo_if_cancelled
from atoll.sdk.session import AsyncSession
from atoll.sdk.values import SessionInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.sdk.http_client import HttpClient
    from atoll.sdk.options import CreateOptions


class AsyncSessions:
    """All sessions of the server."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    @show_options
    def create(
        self,
        template: str | None = None,
        *,
        idempotency_key: str | None = None,
        **options: Unpack[CreateOptions],
    ) -> Pending[AsyncSession]:
        """
        Create a session, ready to run code. It exists until its lifetime ends, you delete it, or
        its `with` block ends.

            session = atoll.sessions.create("python", memory="1Gi", timeout=3600)

        Resources: `cpu` in cores (1, 0.5, "500m"), `memory` and `disk` in bytes or like "512Mi",
        `max_processes`, and `timeout`, the lifetime in seconds. Omitted options take the values of
        the template, then those of the server's settings. `capacity` is how many executions run
        at the same time (1); further ones wait in order.

        Data: `env` are environment variables. `secrets` are environment variables that the server
        stores encrypted and never returns. `volumes` are mounted where each `Mount` says.
        `started_from` is the id of a session, possibly ended, whose files this one starts with.
        With `workspace_mode="mount"` the workspace is mounted from the server's bucket. With
        `durability="execution"` a checkpoint is taken before each result is final.

        Packages: `dependencies` are Python packages such as "requests" or "pandas>=2,<3". The call
        waits for their installation, at most `install_timeout` seconds (300). If it fails, the call
        raises `InvalidRequest` with the code `dependency_failed`, unless
        `fail_on_dependency_error` is False. The template's versions win, unless
        `allow_version_conflicts` is True.

        Lifecycle: after `idle_timeout` seconds without requests the session is stopped. After
        `archive_after` seconds stopped it is archived, and after `delete_after` seconds it ends.
        0 means never. A request to a paused, stopped or archived session starts it, unless
        `auto_start` is False. `labels` are your own; `node_labels` restrict the nodes.

        Calls with the same `idempotency_key` and arguments return the same session, also in other
        processes.
        """
        check_string(template=template)
        body = encode(options, CREATE_FIELDS, call="sessions.create")
        if template is not None:
            body["template_id"] = template
        wait = 0.0
        if "dependencies" in body:
            wait = float(options.get("install_timeout") or INSTALL_TIMEOUT)
        return Pending("sessions.create", self._create(body, wait, idempotency_key))

    async def _create(self, body: dict[str, Any], wait: float, key: str | None) -> AsyncSession:
        if key is None:
            creation = self._http.call("POST", "sessions", body=body, wait=wait)
        else:
            creation = self._http.call_once("sessions", key=key, body=body, wait=wait)
        answer = await undo_if_cancelled(creation, lambda answer: self.delete(answer["id"]))
        return AsyncSession(self._http, decode(SessionInfo, answer))

    async def get(self, session_id: str) -> AsyncSession:
        """The session with this id. Raises `NotFound` if it does not exist."""
        path = f"sessions/{url_segment(session_id)}"
        return AsyncSession(self._http, await self._http.fetch(SessionInfo, "GET", path))

    async def list(
        self, *, status: str | None = None, template: str | None = None
    ) -> AsyncIterator[AsyncSession]:
        """Sessions, including ended ones, newest first. Pages are fetched as needed."""
        query = {"status": status, "template_id": template}
        async for info in self._http.items(SessionInfo, "sessions", query):
            yield AsyncSession(self._http, info)

    async def delete(self, session_id: str) -> SessionInfo:
        """End a session. Its record and results stay readable."""
        return await self._http.fetch(SessionInfo, "DELETE", f"sessions/{url_segment(session_id)}")
