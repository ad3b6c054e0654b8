"""The store while its database is killed, silent, replaced or cut off at the worst time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa

from atoll.errors import Conflict, TemporaryError
from atoll.model.event import execution_event
from atoll.model.execution import Request
from atoll.settings import DatabaseSettings, SqliteSettings
from atoll.stores.sql.server.connect import TRUSTED, make_engine
from atoll.stores.sql.server.engine import ServerEngine
from atoll.stores.sql.store import SqlStore
from tests.contract.stores.store_entities import (
    NOW,
    completed,
    ended,
    following,
    invoked,
    make_execution,
    make_instance,
    make_session,
    make_template,
)
from tests.servers.databases import empty, migrate
from tests.servers.mariadb import MariaDB
from tests.servers.postgres import PostgreSQL
from tests.servers.process import DatabaseServer

pytestmark = pytest.mark.anyio

Open = Callable[..., Awaitable[SqlStore]]
T = TypeVar("T")

SERVERS = {"mariadb": MariaDB, "postgresql": PostgreSQL}
# Long enough for a server to start again.
PATIENT = DatabaseSettings(retries=8, retry_backoff=timedelta(seconds=0.1))
# A stopped server refuses connections immediately.
GONE = DatabaseSettings(
    retries=0,
    connect_timeout=timedelta(seconds=10),
    operation_timeout=timedelta(seconds=10),
    pool_timeout=timedelta(seconds=10),
)
# Calls wait for a silent server.
SILENT = DatabaseSettings(
    retries=0,
    connect_timeout=timedelta(seconds=3),
    operation_timeout=timedelta(seconds=3),
    pool_timeout=timedelta(seconds=3),
)
# In /proc/net/tcp.
ESTABLISHED = "01"


@pytest.fixture(scope="module", params=["mariadb", "postgresql"])
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[DatabaseServer, DatabaseServer]]:
    """Two of a kind, not those of other tests: they are killed."""
    kind = SERVERS[request.param]
    first, second = (kind(tmp_path_factory.mktemp(f"{request.param}{n}")) for n in range(2))
    with first, second:
        asyncio.run(migrate(first.url))
        asyncio.run(migrate(second.url))
        yield first, second


@pytest.fixture
def server(servers: tuple[DatabaseServer, DatabaseServer]) -> DatabaseServer:
    """The first, running and empty."""
    for each in servers:
        if each.process is None:
            each.start()
        asyncio.run(empty(each.url))
    return servers[0]


@pytest.fixture
async def open_store(server: DatabaseServer, anyio_backend: str) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def open_store(*urls: str, settings: DatabaseSettings | None = None) -> SqlStore:
            store = SqlStore(
                urls or [server.url], sqlite=SqliteSettings(), database=settings or PATIENT
            )
            stack.push_async_callback(store.close)
            await store.open()
            return store

        # Everything below ends on its own; this only bounds a failure.
        async with asyncio.timeout(120):
            yield open_store


@asynccontextmanager
async def opened(server: DatabaseServer, settings: DatabaseSettings) -> AsyncIterator[ServerEngine]:
    engine = ServerEngine([server.url], settings)
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()


async def until_available(call: Callable[[], Awaitable[T]]) -> T:
    """What it gives, as soon as the database serves it."""
    async with asyncio.timeout(60):
        while True:
            with suppress(TemporaryError):
                return await call()
            await asyncio.sleep(0.05)


class Proxy:
    """A way to the server that can be cut when a commit passes: after it, with its answer lost."""

    def __init__(self, server: DatabaseServer) -> None:
        self._server = server
        self.cut: str | None = None
        self.meanwhile: Callable[[], Awaitable[object]] | None = None
        self.commits = 0
        self.messages = 0
        self.url = ""
        self._serving: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        self.url = self._server.url.replace(f":{self._server.port}/", f":{port}/")
        try:
            yield self
        finally:
            listener.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        answers = asyncio.create_task(self._pass_on(far_reader, writer))
        in_transaction = False
        try:
            while data := await reader.read(65536):
                self.messages += 1
                if data.startswith(b"Q"):
                    in_transaction = b"BEGIN" in data
                # The whole command of either protocol, not the isolation level's name. Outside a
                # transaction each statement that PostgreSQL executes is one.
                if data.endswith((b"\x03COMMIT", b";COMMIT;END", b"COMMIT;\0")) or (
                    data.startswith(b"B") and not in_transaction
                ):
                    self.commits += 1
                    if self.cut is not None:
                        await self._cut(data, far_reader, far_writer, answers)
                        return
                far_writer.write(data)
                await far_writer.drain()
        except ConnectionError:
            pass
        finally:
            answers.cancel()
            for each in (writer, far_writer):
                each.transport.abort()
            with suppress(asyncio.CancelledError):
                await answers

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.close()

    async def _cut(
        self,
        data: bytes,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
        answers: asyncio.Task[None],
    ) -> None:
        cut, self.cut = self.cut, None
        answers.cancel()
        with suppress(asyncio.CancelledError):
            await answers
        if cut == "after":
            far_writer.write(data)
            assert await far_reader.read(65536)
        else:
            far_writer.transport.abort()
        if self.meanwhile is not None:
            await self.meanwhile()


@pytest.fixture
async def proxy(server: DatabaseServer, anyio_backend: str) -> AsyncIterator[Proxy]:
    async with Proxy(server).running() as running:
        yield running


async def test_calls_to_a_killed_database_fail_until_it_restarts(
    server: DatabaseServer, open_store: Open
) -> None:
    store = await open_store(settings=GONE)
    execution = make_execution()
    await store.executions.add(execution)

    server.kill()

    for call in (
        store.ping(),
        store.executions.get(execution.id),
        store.executions.save(completed(execution)),
        store.sessions.add(make_session()),
    ):
        with pytest.raises(TemporaryError) as caught:
            await call
        assert caught.value.code == "database_unavailable"
        assert caught.value.retry_after > 0
        assert f":{server.port}" in caught.value.message
        assert "password" not in caught.value.message

    await asyncio.to_thread(server.start)
    assert await store.executions.get(execution.id) == execution
    assert (await store.executions.save(completed(execution))).version == 2


async def test_repeatable_calls_outlast_a_restart(server: DatabaseServer, open_store: Open) -> None:
    store = await open_store()
    execution, template = make_execution(), make_template()
    await store.executions.add(execution)
    server.kill()

    calls = asyncio.gather(
        store.executions.get(execution.id),
        store.executions.save(completed(execution)),
        store.templates.add(template),
    )
    await asyncio.to_thread(server.start)
    _, saved, _ = await calls

    assert await store.executions.get(execution.id) == saved
    assert await store.templates.get(template.id) == template


async def test_while_the_database_is_down_calls_fail_without_retries(
    server: DatabaseServer, open_store: Open
) -> None:
    for_ever = DatabaseSettings(retries=1, retry_backoff=timedelta(hours=1))
    store = await open_store(settings=for_ever)
    engine = store._engine
    assert isinstance(engine, ServerEngine)
    await asyncio.to_thread(server.kill)
    ping = asyncio.create_task(store.ping())
    while engine._down is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert not ping.done()
    ping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ping

    answers = await asyncio.gather(
        *(store.executions.add(make_execution()) for _ in range(50)), return_exceptions=True
    )

    assert all(isinstance(answer, TemporaryError) for answer in answers)
    await asyncio.to_thread(server.start)
    await store.ping()


async def test_calls_to_a_silent_database_time_out(
    server: DatabaseServer, open_store: Open
) -> None:
    store = await open_store(settings=SILENT)
    execution = make_execution()
    await store.executions.add(execution)
    large = make_execution(request=Request(code="x" * 3_000_000))
    server.pause()
    try:
        errors = await asyncio.gather(
            store.ping(),
            store.executions.get(execution.id),
            store.executions.add(large),
            store.sessions.add(make_session()),
            return_exceptions=True,
        )
        for error in errors:
            assert isinstance(error, TemporaryError), errors
            assert error.code == "database_unavailable"
    finally:
        server.resume()

    assert await until_available(lambda: store.executions.get(execution.id)) == execution


def connections_to(port: int) -> list[str]:
    """Those from here that are open, as the kernel lists them."""
    ends = (line.split()[2:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return [far for far, state in ends if far.endswith(f":{port:04X}") and state == ESTABLISHED]


async def test_calls_time_out_when_the_database_falls_silent_during_a_transaction(
    server: DatabaseServer, open_store: Open
) -> None:
    template = make_template()

    def write(connection: Any) -> None:
        connection.execute("SELECT 1").fetchone()
        server.pause()
        # More than the sockets between hold: it cannot even be sent.
        connection.execute("SELECT :text AS text", {"text": template.id * 500_000}).fetchone()

    def read(connection: Any) -> None:
        connection.execute("SELECT 1").fetchone()

    async with opened(server, SILENT) as engine:
        try:
            with pytest.raises(TemporaryError) as caught:
                await engine.write(write)
            # Not kept until the rest could be sent, which may be never.
            await asyncio.sleep(0)
            assert connections_to(server.port) == []
        finally:
            server.resume()

        assert caught.value.code == "database_unavailable"
        await until_available(lambda: engine.read(read))


async def test_a_cancelled_call_leaves_no_broken_connection_in_the_pool(
    server: DatabaseServer,
) -> None:
    alone = PATIENT.model_copy(update={"pool_size": 1, "max_overflow": 0})
    started = asyncio.Event()
    sleep = "SELECT sleep(60)" if isinstance(server, MariaDB) else "SELECT pg_sleep(60)"

    def read(connection: Any) -> None:
        started.set()
        connection.execute(sleep).fetchone()

    async with opened(server, alone) as engine:
        task = asyncio.create_task(engine.read(read))
        await started.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        row = await engine.read(lambda connection: connection.execute("SELECT 7 AS n").fetchone())
    assert row is not None
    assert row["n"] == 7


async def test_the_second_address_is_used_while_the_first_is_unavailable(
    servers: tuple[DatabaseServer, DatabaseServer], open_store: Open
) -> None:
    first, second = servers
    names = [await (await open_store(server.url)).cluster() for server in servers]
    settings = PATIENT.model_copy(update={"pool_recycle": timedelta(0)})
    store = await open_store(first.url, second.url, settings=settings)
    assert await store.cluster() == names[0]

    first.kill()
    assert await store.cluster() == names[1]

    await asyncio.to_thread(first.start)
    assert await store.cluster() == names[0]


async def test_an_error_lists_all_unavailable_addresses(
    servers: tuple[DatabaseServer, DatabaseServer], open_store: Open
) -> None:
    store = await open_store(*(server.url for server in servers), settings=GONE)
    for server in servers:
        await asyncio.to_thread(server.kill)

    with pytest.raises(TemporaryError) as caught:
        await store.ping()

    for server in servers:
        assert f"127.0.0.1:{server.port}: " in caught.value.message
    assert "atoll-password" not in caught.value.message


async def test_a_read_only_secondary_is_replaced_by_the_first_address(
    servers: tuple[DatabaseServer, DatabaseServer], open_store: Open
) -> None:
    first, second = servers
    no_retries = DatabaseSettings(retries=0)
    store = await open_store(first.url, second.url, settings=no_retries)
    await asyncio.to_thread(first.kill)
    set_read_only(second, True)
    try:
        assert await store.executions.get("none") is None
        with pytest.raises(TemporaryError, match="is read-only") as caught:
            await store.executions.add(make_execution())
        assert caught.value.code == "database_unavailable"

        await asyncio.to_thread(first.start)
        execution = make_execution()
        await store.executions.add(execution)
        assert await (await open_store(first.url)).executions.get(execution.id) == execution
    finally:
        set_read_only(second, False)


def set_read_only(server: DatabaseServer, on: bool) -> None:
    assert isinstance(server, MariaDB | PostgreSQL)
    if isinstance(server, MariaDB):
        server.execute(f"SET GLOBAL read_only = {int(on)}")
    else:
        server.execute(
            f"ALTER USER atoll SET default_transaction_read_only = {'on' if on else 'off'}"
        )


class Embrace:
    """Two writes that lock the same two rows in opposite order, and meet in between."""

    def __init__(self, engine: ServerEngine) -> None:
        self._engine = engine
        self._both = asyncio.Barrier(2)
        self.attempts: list[str] = []

    async def run(self, *, repeatable: bool) -> tuple[BaseException | None, ...]:
        insert = "INSERT INTO properties (name, value) VALUES ('a', ''), ('b', '')"
        await self._engine.write(lambda connection: connection.execute(insert).rowcount)
        there, back = self._write("a", "b"), self._write("b", "a")
        answers = await asyncio.gather(
            self._engine.write(there, again=there if repeatable else None),
            self._engine.write(back, again=back if repeatable else None),
            return_exceptions=True,
        )
        return tuple(answers)

    def _write(self, first: str, second: str) -> Callable[[Any], None]:
        def write(connection: Any) -> None:
            self.attempts.append(first)
            for name in (first, second):
                connection.execute(
                    "UPDATE properties SET value = :value WHERE name = :name",
                    {"name": name, "value": first},
                )
                if name == first and self.attempts.count(first) == 1:
                    sa.util.await_only(self._both.wait())

        return write


async def test_a_deadlocked_transaction_is_retried(server: DatabaseServer) -> None:
    async with opened(server, PATIENT) as engine:
        embrace = Embrace(engine)
        answers = await embrace.run(repeatable=True)
        rows = await engine.read(lambda it: it.execute("SELECT value FROM properties").fetchall())
    assert answers == (None, None)
    assert len(embrace.attempts) == 3
    assert len({row["value"] for row in rows}) == 1


async def test_a_transaction_of_several_steps_is_never_retried(server: DatabaseServer) -> None:
    async with opened(server, PATIENT) as engine:
        embrace = Embrace(engine)
        answers = await embrace.run(repeatable=False)
    assert sorted(embrace.attempts) == ["a", "b"]
    (error,) = [answer for answer in answers if answer is not None]
    assert isinstance(error, TemporaryError)
    assert error.code == "database_unavailable"


async def test_a_record_and_its_event_are_one_message(proxy: Proxy, open_store: Open) -> None:
    store = await open_store(proxy.url)

    async def write() -> tuple[int, int]:
        execution = make_execution()
        proxy.messages = 0
        await store.executions.add(execution, event=execution_event(execution, "submitted", NOW))
        added, proxy.messages = proxy.messages, 0
        ended = completed(execution)
        await store.executions.save(ended, event=execution_event(ended, "completed", NOW))
        return added, proxy.messages

    await write()  # Prepares the statements.
    assert await write() == (1, 1)


@pytest.mark.parametrize("idle", [0.0, TRUSTED], ids=["used_just_now", "idle"])
async def test_closed_connections_are_replaced_before_they_are_used(
    server: DatabaseServer, open_store: Open, idle: float
) -> None:
    store = await open_store(settings=DatabaseSettings(retries=0))
    executions = [make_execution() for _ in range(4)]
    await asyncio.gather(*(store.executions.add(execution) for execution in executions))

    await asyncio.to_thread(close_connections, server)
    await asyncio.sleep(idle)

    for execution in executions:
        assert await store.executions.get(execution.id) == execution


def close_connections(server: DatabaseServer) -> None:
    """All of Atoll's, by the server."""
    assert isinstance(server, MariaDB | PostgreSQL)
    if isinstance(server, MariaDB):
        server.execute("KILL CONNECTION USER atoll")
    else:
        server.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = 'atoll'"
        )


async def test_after_one_connection_broke_the_others_are_checked(
    proxy: Proxy, open_store: Open
) -> None:
    store = await open_store(proxy.url, settings=DatabaseSettings(retries=0))
    execution = make_execution()

    async def messages_of_reads() -> int:
        proxy.messages = 0
        await asyncio.gather(*(store.executions.get(execution.id) for _ in range(3)))
        return proxy.messages

    await messages_of_reads()  # Connects, and prepares the statement.
    messages = await messages_of_reads()
    proxy.cut = "before"
    with pytest.raises(TemporaryError):
        await store.executions.add(execution)
    await store.executions.add(execution)

    assert await messages_of_reads() >= messages + 2


async def test_an_add_with_an_unconfirmed_commit_is_stored_once(
    proxy: Proxy, open_store: Open
) -> None:
    store, direct = await open_store(proxy.url), await open_store()
    execution, template = make_execution(), make_template()

    proxy.cut = "after"
    await store.executions.add(execution)
    proxy.cut = "after"
    await store.templates.add(template)

    assert proxy.cut is None
    assert await direct.executions.get(execution.id) == execution
    assert await direct.templates.get(template.id) == template
    with pytest.raises(Conflict):
        await store.executions.add(execution)


async def test_a_save_with_an_unconfirmed_commit_is_written_once(
    proxy: Proxy, open_store: Open
) -> None:
    store, direct = await open_store(proxy.url), await open_store()
    execution, session = make_execution(), make_session()
    await store.executions.add(execution)
    await store.sessions.add(session)

    proxy.cut = "after"
    done = await store.executions.save(completed(execution, stdout=b"out"))
    proxy.cut = "after"
    changed = await store.sessions.save(replace(session, message="changed"))

    assert proxy.cut is None
    assert (done.version, changed.version) == (2, 2)
    assert await direct.executions.get(execution.id) == done
    assert await direct.sessions.get(session.id) == changed


async def test_a_write_interrupted_before_its_commit_is_repeated(
    proxy: Proxy, open_store: Open
) -> None:
    store, direct = await open_store(proxy.url), await open_store()
    execution = make_execution()

    proxy.cut = "before"
    await store.executions.add(execution)
    proxy.cut = "before"
    saved = await store.executions.save(completed(execution))

    assert await direct.executions.get(execution.id) == saved


@pytest.mark.parametrize("cut", ["before", "after"])
async def test_an_invocation_is_written_once_whenever_the_connection_is_cut(
    proxy: Proxy, open_store: Open, cut: str
) -> None:
    store, direct = await open_store(proxy.url), await open_store()
    first = invoked()

    proxy.cut = cut
    await store.executions.add(first)
    proxy.cut = cut
    lost = await store.executions.save(ended(first))
    proxy.cut = cut
    second = following(lost)
    await store.executions.add_after(second, lost)

    assert proxy.cut is None
    assert (await direct.executions.page(invocation_id=first.invocation_id)).items == (
        second,
        replace(lost, superseded=True, version=lost.version + 1),
    )


async def test_an_interrupted_retry_that_loses_to_another_leaves_nothing(
    proxy: Proxy, open_store: Open
) -> None:
    store, direct = await open_store(proxy.url), await open_store()
    first = invoked()
    await store.executions.add(first)
    mine, other = following(first), following(first)
    proxy.cut = "before"
    proxy.meanwhile = lambda: direct.executions.add_after(other, first)

    with pytest.raises(Conflict, match=first.id):
        await store.executions.add_after(mine, first)

    assert (await direct.executions.page(invocation_id=first.invocation_id)).items == (
        other,
        replace(first, superseded=True, version=2),
    )


async def test_an_interrupted_save_does_not_mistake_another_for_its_own(
    proxy: Proxy, open_store: Open
) -> None:
    store, direct = await open_store(proxy.url), await open_store()
    execution = make_execution()
    await store.executions.add(execution)
    other = completed(execution, stdout=b"other")
    proxy.cut = "before"
    proxy.meanwhile = lambda: direct.executions.save(other)

    with pytest.raises(Conflict):
        await store.executions.save(completed(execution, stdout=b"mine"))

    assert await direct.executions.get(execution.id) == replace(other, version=2)


async def test_an_interrupted_add_does_not_mistake_another_for_its_own(
    proxy: Proxy, open_store: Open
) -> None:
    store, direct = await open_store(proxy.url), await open_store()
    execution = make_execution()
    proxy.cut = "before"
    proxy.meanwhile = lambda: direct.executions.add(replace(execution, retry_count=7))

    with pytest.raises(Conflict):
        await store.executions.add(execution)


async def test_an_interrupted_write_of_several_steps_is_not_repeated(
    proxy: Proxy, open_store: Open
) -> None:
    store, direct = await open_store(proxy.url), await open_store()
    instance = make_instance()
    await store.instances.add(instance)
    session = make_session(instance_id=instance.id)
    proxy.cut, proxy.commits = "after", 0

    with pytest.raises(TemporaryError) as caught:
        await store.sessions.add(session)

    assert caught.value.code == "database_unavailable"
    assert proxy.commits == 1
    assert await direct.sessions.get(session.id) == session


async def test_connections_beyond_the_limit_of_the_server_are_unavailable(
    server: DatabaseServer, open_store: Open
) -> None:
    store = await open_store(settings=GONE)
    hog = make_engine([server.url], DatabaseSettings(pool_size=500))
    await store.close()
    async with AsyncExitStack() as held:
        held.push_async_callback(hog.dispose)

        async def take_all() -> None:
            while True:
                held.push_async_callback((await hog.connect()).close)

        with pytest.raises(TemporaryError) as caught:
            await take_all()
        with pytest.raises(TemporaryError) as opening:
            await store.open()

    assert caught.value.code == opening.value.code == "database_unavailable"
    assert "connection" in caught.value.message
    # The server may count those that were closed for a moment longer.
    await until_available(store.open)
