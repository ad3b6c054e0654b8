"""Sessions and contexts with and without a `with` block, and names of other libraries."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from atoll import AsyncAtoll, Atoll
    from tests.component.sdk.fake_server import FakeServer


def deleted(fake_server: FakeServer) -> list[str]:
    return [path for method, path in fake_server.requests if method == "DELETE"]


def test_a_session_can_be_used_with_and_without_a_block(
    atoll: Atoll, fake_server: FakeServer
) -> None:
    session = atoll.session()
    assert session.run("1").stdout == "1"
    session.delete()
    with atoll.session() as session:
        assert session.run("2").stdout == "2"
    with atoll.sessions.create() as session:
        assert session.run("3").stdout == "3"
    assert len(deleted(fake_server)) == 3


@pytest.mark.anyio
async def test_an_asynchronous_session_can_be_used_with_and_without_a_block(
    async_atoll: AsyncAtoll, fake_server: FakeServer
) -> None:
    session = await async_atoll.session()
    assert (await session.run("1")).stdout == "1"
    await session.delete()
    async with async_atoll.session() as session:
        assert (await session.run("2")).stdout == "2"
    async with async_atoll.sessions.create() as session:
        assert (await session.run("3")).stdout == "3"
    async with await async_atoll.sessions.create() as session:
        assert (await session.run("4")).stdout == "4"
    assert len(deleted(fake_server)) == 4


@pytest.mark.anyio
async def test_a_pending_session_explains_that_it_must_be_awaited(async_atoll: AsyncAtoll) -> None:
    opening = async_atoll.session()
    with pytest.raises(AttributeError, match=r"`await atoll\.session\(…\)`"):
        opening.run  # type: ignore[attr-defined] # noqa: B018
    await (await opening).delete()


def test_an_unclosed_session_causes_a_warning(atoll: Atoll) -> None:
    def leave_open() -> None:
        atoll.session()
        gc.collect()

    with pytest.warns(ResourceWarning, match=r"<Session .* was not closed"):
        leave_open()


def test_a_closed_or_long_lived_session_causes_no_warning(
    atoll: Atoll, recwarn: pytest.WarningsRecorder
) -> None:
    atoll.sessions.create()
    with atoll.session() as session:
        session.run("1")
    session = atoll.session()
    session.delete()
    del session
    gc.collect()
    assert not [found for found in recwarn if found.category is ResourceWarning]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("run_code", r"run\(code\)"),
        ("kill", r"delete\(\)"),
        ("commands", r"run\(command=\[…\]\)"),
        ("set_timeout", r"extend\(seconds\)"),
    ],
)
def test_names_of_other_libraries_lead_to_ours(atoll: Atoll, name: str, instead: str) -> None:
    with atoll.session() as session:
        with pytest.raises(AttributeError, match=f"'Session' .*{name}.* Use {instead}"):
            getattr(session, name)
        with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
            session.nonsense  # type: ignore[attr-defined] # noqa: B018
        assert not hasattr(session, "nonsense")
