"""Files of unavailable sessions, read from their checkpoints."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, cast

import pytest

from atoll.clock import SystemClock
from atoll.errors import Conflict, TemporaryError
from atoll.model.session import SessionStatus
from atoll.service.files.service import Files
from atoll.service.files.types import ByteRange, FileInfo
from tests.contract.stores.store_entities import make_session
from tests.parts import parts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.service.files.checkpoint_files import CheckpointFiles

pytestmark = pytest.mark.anyio

CONTENT = b"0123456789"
ENTRY = FileInfo("a", "file", 10, 0o644, datetime(2026, 1, 1, tzinfo=UTC), "tag")


class StoredFiles:
    """What was kept: one file of every session."""

    async def open(
        self, session_id: str, path: str, start: int, end: int | None
    ) -> tuple[FileInfo, AsyncIterator[bytes]] | None:
        return None if path != "a" else (ENTRY, _pieces(CONTENT[start:end]))

    async def list(
        self, session_id: str, path: str, *, after: str | None, limit: int
    ) -> tuple[list[FileInfo], str | None] | None:
        return ([], None) if after else ([ENTRY], "a")


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def read(files: Files, session_id: str, part: ByteRange | None = None) -> bytes | None:
    found = await files.read(session_id, "a", part)
    assert found.entry == ENTRY
    return None if found.start is None else b"".join([piece async for piece in found.content])


@pytest.mark.parametrize("away", ["ended", "elsewhere"])
async def test_files_of_an_unavailable_session_are_read_from_the_checkpoint(
    tmp_path: Path, away: str
) -> None:
    async with parts(tmp_path, SystemClock()) as found:
        fields = {"status": SessionStatus.TERMINATED} if away == "ended" else {}
        session = make_session(runtime_node="another", **fields)
        await found.store.sessions.add(session)
        work_timeout = timedelta(seconds=1)
        files = Files(
            found.access,
            found.driver,
            work_timeout=work_timeout,
            checkpoint_files=cast("CheckpointFiles", StoredFiles()),
        )

        assert await read(files, session.id) == CONTENT
        assert await read(files, session.id, ByteRange(2, 4)) == b"234"
        assert await read(files, session.id, ByteRange(None, 3)) == b"789"
        assert await read(files, session.id, ByteRange(2, 4, "other")) == CONTENT
        assert await read(files, session.id, ByteRange(10, None)) is None
        page = await files.list(session.id, "", cursor=None, limit=10)
        assert page.items == (ENTRY,)
        assert (await files.list(session.id, "", cursor=page.next_cursor, limit=10)).items == ()
        # Files that were not saved, and all files without a blob store, are as unavailable as the
        # session.
        for call in (
            files.read(session.id, "b"),
            Files(found.access, found.driver, work_timeout=work_timeout).read(session.id, "a"),
            files.write(session.id, "a", _pieces(b"x")),
        ):
            with pytest.raises((Conflict, TemporaryError)) as refused:
                await call
            assert refused.value.code in ("session_ended", "node_not_reached")
