"""
The artifacts of a session: the newest version of each path, over all its executions.

In order of path, page by page. Memory goes by the page and not by how many there are; time goes by
the executions, of which the newest `MOST` are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.model.page import Page
from atoll.service import cursors

if TYPE_CHECKING:
    from atoll.model.execution import Artifact
    from atoll.service.sessions.access import SessionAccess
    from atoll.stores.base import Store

MOST = 10_000
_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Version:
    """An artifact, and the execution that made it what it is."""

    execution_id: str
    artifact: Artifact


class Artifacts:
    def __init__(self, store: Store, sessions: SessionAccess) -> None:
        self._store = store
        self._sessions = sessions

    async def page(self, session_id: str, *, cursor: str | None, limit: int) -> Page[Version]:
        await self._sessions.records.get(session_id)
        after = cursors.decode("a", cursor)
        found: dict[str, Version] = {}
        following: str | None = None
        for _ in range(MOST // _AT_ONCE):
            page = await self._store.executions.page(
                session_id=session_id, cursor=following, limit=_AT_ONCE
            )
            for execution in page.items:
                if execution.outcome is None:
                    continue
                for artifact in execution.outcome.artifacts:
                    if after is None or artifact.path > after:
                        # Newest first: an older one does not count.
                        found.setdefault(artifact.path, Version(execution.id, artifact))
                if len(found) > 2 * limit:
                    # One that is left out here is left out again whenever it comes.
                    found = {path: found[path] for path in sorted(found)[: limit + 1]}
            following = page.next_cursor
            if following is None:
                break
        chosen = sorted(found)
        items = tuple(found[path] for path in chosen[:limit])
        last = chosen[limit - 1] if len(chosen) > limit else None
        return Page(items, cursors.encode("a", last))
