"""Sessions: making, finding and ending them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from atoll.sdk.arguments import (
    check_limits,
    check_numbers,
    check_string,
    check_string_dict,
    wrong_type,
)
from atoll.sdk.decode import decode
from atoll.sdk.dependencies import INSTALL_TIMEOUT, dependencies_body
from atoll.sdk.paths import url_segment
from atoll.sdk.pending import Pending
from atoll.sdk.retry import undo_if_cancelled
from atoll.sdk.session import AsyncSession
from atoll.sdk.values import Mount, SessionInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from atoll.sdk.http_client import HttpClient


class AsyncSessions:
    """All sessions of the server."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    def create(
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
        fail_on_dependency_error: bool | None = None,
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
        idempotency_key: str | None = None,
    ) -> Pending[AsyncSession]:
        """
        A new session, ready to run code, which lives until its time is over, or for the length of a
        `with` block.

        `timeout` is its life in seconds. `cpu` is in cores (1, 0.5, "500m"), `memory` and `disk` in
        bytes or like "512Mi". What is left out comes from the template, and from the server's
        settings after that. `capacity` is how many executions run in it at the same time, 1 by
        default; what is submitted beyond that waits in order.

        `secrets` are variables as `env` is, which the server keeps encrypted and shows to nobody.
        `volumes` are shown inside where each `Mount` says. With `workspace_mode="mount"` the
        workspace is in the server's bucket itself, mounted by the node. With
        `durability="execution"` files are saved before each result is final. With `started_from`
        it begins with the files of that session, which may have ended.

        `dependencies` are Python packages of its own, such as "requests" or "pandas>=2,<3"; the
        call waits for them, at most `install_timeout` seconds (300). When they cannot be installed
        it raises `InvalidRequest` with the code `dependency_failed`, unless
        `fail_on_dependency_error` is False. Versions of the template's packages stand, unless
        `allow_version_conflicts` is True.

        `idle_timeout` is after how many seconds without requests it is stopped; `archive_after` and
        `delete_after` are after how many seconds at rest it is archived, or ends. 0 is never; what
        is left out is as the server's settings say. What is asked of a session that is paused or
        at rest starts it, unless `auto_start` is False. `labels` are yours, and are shown.

        With an `idempotency_key`, all calls with the same key and arguments give the same session,
        also those of other processes.
        """
        check_string(
            template=template,
            workspace_mode=workspace_mode,
            durability=durability,
            started_from=started_from,
        )
        check_numbers(
            timeout=timeout,
            capacity=capacity,
            install_timeout=install_timeout,
            idle_timeout=idle_timeout,
            archive_after=archive_after,
            delete_after=delete_after,
        )
        check_limits(cpu=cpu, memory=memory, disk=disk, max_processes=max_processes)
        check_string_dict(env=env, secrets=secrets, labels=labels)
        body = {
            "template_id": template,
            "timeout": timeout,
            "cpu": None if cpu is None else str(cpu),
            "memory": None if memory is None else str(memory),
            "disk": None if disk is None else str(disk),
            "max_processes": max_processes,
            "env_vars": dict(env) if env else None,
            "capacity": capacity,
            "dependencies": dependencies_body(dependencies) or None,
            "install_timeout": install_timeout,
            "fail_on_dependency_error": fail_on_dependency_error,
            "allow_version_conflicts": allow_version_conflicts,
            "secrets": dict(secrets) if secrets else None,
            "volumes": _mounts(volumes) or None,
            "workspace_mode": workspace_mode,
            "durability": durability,
            "started_from": started_from,
            "labels": dict(labels) if labels else None,
            "auto_start": auto_start,
            "idle_timeout": idle_timeout,
            "archive_after": archive_after,
            "delete_after": delete_after,
        }
        given = {name: value for name, value in body.items() if value is not None}
        wait = float(install_timeout or INSTALL_TIMEOUT) if dependencies else 0.0
        return Pending("sessions.create", self._create(given, wait, idempotency_key))

    async def _create(self, body: dict[str, Any], wait: float, key: str | None) -> AsyncSession:
        if key is None:
            creation = self._http.call("POST", "sessions", body=body, wait=wait)
        else:
            creation = self._http.call_once("sessions", key=key, body=body, wait=wait)
        answer = await undo_if_cancelled(creation, lambda answer: self.delete(answer["id"]))
        return AsyncSession(self._http, decode(SessionInfo, answer))

    async def get(self, session_id: str) -> AsyncSession:
        """The session with this id; raises `NotFound` when there is none."""
        answer = await self._http.call("GET", f"sessions/{url_segment(session_id)}")
        return AsyncSession(self._http, decode(SessionInfo, answer))

    async def list(
        self, *, status: str | None = None, template: str | None = None
    ) -> AsyncIterator[AsyncSession]:
        """Sessions, newest first, ended ones included; pages are fetched as they are needed."""
        query = {"status": status, "template_id": template}
        async for item in self._http.pages("sessions", query):
            yield AsyncSession(self._http, decode(SessionInfo, item))

    async def delete(self, session_id: str) -> SessionInfo:
        """End a session; its record and the results stay readable."""
        answer = await self._http.call("DELETE", f"sessions/{url_segment(session_id)}")
        return decode(SessionInfo, answer)


def _mounts(volumes: Any) -> list[dict[str, Any]]:
    if not isinstance(volumes, Iterable):
        raise wrong_type("volumes", "a list of Mount", volumes)
    for index, mount in enumerate(volumes := list(volumes)):
        if not isinstance(mount, Mount):
            raise wrong_type(f"volumes[{index}]", "a Mount", mount)
    return [asdict(mount) for mount in volumes]
