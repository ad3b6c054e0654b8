"""
A session's files.

Every path is resolved by the executor, inside the instance and beneath the workspace: the control
plane never opens a file of user code.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from atoll.errors import Conflict, InvalidRequest, NotFound
from atoll.link.client import ExecutorError
from atoll.model.page import Page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from atoll.service.lives import Lives

MAX_LIST = 1000

_NOT_FOUND = {"file_not_found"}
_CONFLICTS = {
    "is_directory",
    "not_directory",
    "file_exists",
    "not_empty",
    "not_a_file",
    "disk_full",
}


@dataclass(frozen=True, slots=True)
class Entry:
    path: str
    type: str
    size: int
    mode: int
    modified_at: datetime

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class Files:
    def __init__(self, lives: Lives) -> None:
        self._lives = lives

    async def list(
        self, session_id: str, path: str, *, cursor: str | None, limit: int
    ) -> Page[Entry]:
        answer = await self._call(
            session_id, "list", path=path, after=cursor, limit=min(limit, MAX_LIST)
        )
        return Page(tuple(_entry(item) for item in answer["entries"]), answer["next"])

    async def stat(self, session_id: str, path: str) -> Entry:
        return _entry((await self._call(session_id, "stat", path=path))["entry"])

    async def read(self, session_id: str, path: str) -> tuple[Entry, AsyncIterator[bytes]]:
        """A file and its content, which is read as fast as it is taken."""
        live = await self._lives.live(session_id)
        entry, content = await _translated(live.link.read(path))
        return _entry(entry), content

    async def write(self, session_id: str, path: str, content: AsyncIterator[bytes]) -> Entry:
        """The file is there whole, or is as it was."""
        live = await self._lives.live(session_id)
        return _entry(await _translated(live.link.write(path, content)))

    async def mkdir(self, session_id: str, path: str, *, parents: bool) -> Entry:
        return _entry((await self._call(session_id, "mkdir", path=path, parents=parents))["entry"])

    async def move(self, session_id: str, source: str, target: str, *, overwrite: bool) -> Entry:
        answer = await self._call(
            session_id, "move", source=source, target=target, overwrite=overwrite
        )
        return _entry(answer["entry"])

    async def remove(self, session_id: str, path: str, *, recursive: bool) -> None:
        await self._call(session_id, "remove", path=path, recursive=recursive)

    async def _call(self, session_id: str, op: str, **request: Any) -> dict[str, Any]:
        live = await self._lives.live(session_id)
        answer: dict[str, Any] = await _translated(live.link.call(op, **request))
        return answer


async def _translated(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except ExecutorError as error:
        if error.code in _NOT_FOUND:
            raise NotFound(error.message, code=error.code) from None
        if error.code in _CONFLICTS:
            raise Conflict(error.message, code=error.code) from None
        raise InvalidRequest(error.message, code=error.code) from None


def _entry(item: dict[str, Any]) -> Entry:
    return Entry(
        path=str(item["path"]),
        type=str(item["type"]),
        size=int(item["size"]),
        mode=int(item["mode"]),
        modified_at=datetime.fromtimestamp(int(item["modified"]) // 1000 / 1e6, UTC),
    )
