"""Consoles of the SDK, against a real server and an embedded one."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from atoll import AsyncAtoll, Atoll, ConsoleEvent, InvalidRequest, NotFound
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll import AsyncConsole, AsyncSession

pytestmark = [pytest.mark.anyio, pytest.mark.quick]

BASH = ["bash", "--norc", "--noprofile", "-i"]


@pytest.fixture(params=["server", "embedded"])
async def client(
    request: pytest.FixtureRequest, server: Server, tmp_path: Path
) -> AsyncIterator[AsyncAtoll]:
    if request.param == "server":
        async with AsyncAtoll(server.url, api_key=server.key) as atoll:
            yield atoll
    else:
        async with AsyncAtoll(data_dir=tmp_path, pool={"size": 0}) as atoll:
            yield atoll


@pytest.fixture
async def own(client: AsyncAtoll) -> AsyncIterator[AsyncSession]:
    async with client.session() as session:
        yield session


async def until(console: AsyncConsole, text: bytes) -> bytes:
    """The output, up to where this is in it."""
    output = b""
    async with asyncio.timeout(20):
        async for event in console:
            output += event.data
            if text in output:
                return output
    raise AssertionError(f"it did not come: {output!r}")


async def test_a_console_has_a_terminal(own: AsyncSession) -> None:
    execution = await own.interactive(BASH, rows=20, cols=70)
    async with execution.console() as console:
        await console.send("stty size\n")
        await until(console, b"20 70\r\n")
        assert (console.typing, console.terminal, console.status) == (True, True, "running")
        await console.resize(33, 44)
        await console.send(b"stty size\n")
        await until(console, b"33 44\r\n")
        await console.send("sh -c \"echo be''gun; exec sleep 100\"\n")
        await until(console, b"begun\r\n")
        await console.signal("INT")
        await console.send("echo $?; exit 3\n")
        exit = await console.wait()
    assert (exit.exit_code, exit.status, exit.cause) == (3, "failed", "exit")
    assert (await execution.result()).exit_code == 3


async def test_a_console_without_a_terminal_has_pipes(own: AsyncSession) -> None:
    execution = await own.interactive(["sh", "-c", "cat; echo over >&2"])
    async with execution.console() as console:
        large = b"0123456789abcde\n" * 50_000
        received = {"stdout": b"", "stderr": b""}
        sending = asyncio.create_task(console.send(large, eof=True))
        async for event in console:
            if event.kind in received:
                received[event.kind] += event.data
        await sending
        assert event.exit is not None
        assert event.exit.exit_code == 0
    assert received == {"stdout": large, "stderr": b"over\n"}


async def test_a_shell_is_the_default_command(own: AsyncSession) -> None:
    execution = await own.interactive(rows=24, cols=80, env={"PS1": "$ "})
    async with execution.console() as console:
        await console.send("echo $((6*7)); exit\n")
        assert b"42\r\n" in await until(console, b"42\r\n")
        assert (await console.wait()).exit_code == 0


async def test_other_consoles_watch_and_take_over(own: AsyncSession) -> None:
    execution = await own.interactive(BASH, rows=24, cols=80)
    async with execution.console() as first:
        await first.send("echo fi''rst\n")
        await until(first, b"first\r\n")
        async with execution.console() as second, execution.console(watch=True) as third:
            await second.send("x")
            refused = await anext(event async for event in second if event.kind == "error")
            assert refused.code == "console_taken"
            await until(third, b"first\r\n")
    # The first client has left, and so have all others; the next one types once that is known.
    async with execution.console() as second, asyncio.timeout(20):
        while not second.typing:
            await anext(aiter(second))
        await second.send("exit\n")
        assert (await second.wait()).exit_code == 0
    with pytest.raises(NotFound):
        async with own.execution("exec_none").console():
            pass


async def test_an_execution_is_ended_from_its_console(own: AsyncSession) -> None:
    execution = await own.interactive(["sleep", "100"], rows=24, cols=80)
    async with execution.console() as console:
        await console.end()
        assert (await console.wait()).status == "cancelled"
        with pytest.raises(StopAsyncIteration):
            await anext(aiter(console))
        # Input to an ended execution is discarded.
        await console.send("x")
        await console.resize(1, 1)


async def test_an_unread_console_blocks_nothing(own: AsyncSession) -> None:
    command = ["sh", "-c", "read x; yes 0123456789abcdef | head -c 20000000"]
    execution = await own.interactive(command, rows=24, cols=80)
    async with execution.console() as console:
        await console.send("\n")
        assert (await execution.wait(60)).exit_code == 0
        # The client can reconnect: the last output and the result are available.
        assert (await console.wait()).exit_code == 0


async def test_closing_a_console_ends_its_readers(own: AsyncSession) -> None:
    execution = await own.interactive(BASH, rows=24, cols=80)
    async with execution.console() as console:
        await console.send("x")
        listening = asyncio.create_task(console.wait())
    with pytest.raises(InvalidRequest) as left:
        await asyncio.wait_for(listening, 30)
    assert left.value.code == "console_closed"
    with pytest.raises(InvalidRequest):
        await console.send("x")
    assert (await execution.status()).status == "running"


async def test_a_command_is_a_list(own: AsyncSession) -> None:
    with pytest.raises(InvalidRequest):
        await own.interactive("ls -l")


async def test_a_stopped_server_ends_its_consoles(bubblewrap: str, tmp_path: Path) -> None:
    async with AsyncAtoll(data_dir=tmp_path, pool={"size": 0}) as atoll:
        session = await atoll.sessions.create()
        execution = await session.interactive(BASH, rows=24, cols=80)
        opened = execution.console()
        console = await opened.__aenter__()
        await console.send("echo he''re\n")
        await until(console, b"here\r\n")
        await session.delete()
        assert (await console.wait()).status == "cancelled"
        await opened.__aexit__(None, None, None)


def test_consoles_work_in_synchronous_code(server: Server) -> None:
    with Atoll(server.url, api_key=server.key) as atoll, atoll.session() as session:
        execution = session.interactive(BASH, rows=24, cols=80)
        received: list[ConsoleEvent] = []
        begun = threading.Event()

        def listen() -> None:
            for event in console:
                received.append(event)
                if b"begun\r\n" in b"".join(event.data for event in received):
                    begun.set()

        with execution.console() as console:
            listening = threading.Thread(target=listen)
            listening.start()
            console.send("echo be''gun\n")
            assert begun.wait(20)
            console.send("exit 4\n")
            listening.join(20)
            assert console.wait().exit_code == 4
        assert received[-1].exit is not None
        assert received[-1].exit.exit_code == 4
        assert atoll.execution(execution.id).result().exit_code == 4
