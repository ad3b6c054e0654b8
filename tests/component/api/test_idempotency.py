"""A POST with an Idempotency-Key is served once: on a real SQLite store, with several replicas."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from atoll import ids
from atoll.api.rest.middleware import idempotency
from atoll.api.rest.middleware.bodies import BodyLimit
from atoll.api.rest.middleware.buffering import MAX_BUFFERED, SMALL
from atoll.api.rest.middleware.idempotency import INLINE, RECORD_TIMEOUT, Idempotency
from atoll.api.rest.problems import problem
from atoll.blobs.local import LocalBlobs
from atoll.coordination.memory import MemoryCoordination, MemoryState
from atoll.errors import TemporaryError
from atoll.model.idempotency_record import IdempotencyRecord
from atoll.reconcile.idempotency_keys import BATCH, IdempotencyKeySweep
from atoll.settings import CoordinationSettings, DatabaseSettings, SqliteSettings
from atoll.stores.sql.store import SqlStore
from tests.component.api.in_process_transport import InProcessTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

DAY = timedelta(hours=24)
LIMIT = 40 * 1024 * 1024
PRESENCE = CoordinationSettings().presence_ttl


class ManualClock:
    def __init__(self) -> None:
        self.time = datetime(2026, 11, 15, 23, 59, 50, tzinfo=UTC)

    def now(self) -> datetime:
        return self.time

    def monotonic(self) -> float:
        return self.time.timestamp()


class Work:
    """
    The application behind the middleware. The last part of the path selects the response; the seed
    of each request is appended to `done`.
    """

    def __init__(self, store: SqlStore) -> None:
        self.store = store
        self.done: list[ids.Seed | None] = []
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        order = scope["path"].rpartition("/")[2]
        self.done.append(scope.get("atoll.seed"))
        number, size = len(self.done), 0
        try:
            if order != "unread":
                async for piece in Request(scope, receive).stream():
                    size += len(piece)
            answer = await self.answer(order, number, size)
        except ClientDisconnect:
            answer = Response("broken off", 422)
        await answer(scope, receive, send)
        if order == "broken":
            raise ZeroDivisionError

    async def answer(self, order: str, number: int, size: int) -> Response:
        match order:
            case (
                "session_busy" | "instance_not_started" | "node_full"
                | "database_unavailable" | "lease_lost"
            ):  # fmt: skip
                return problem(TemporaryError("no", code=order))
            case "broken":
                return Response("broken", 500)
            case "large":
                return Response(b"%d" % number + bytes(INLINE), media_type="image/png")
            case "huge":
                return StreamingResponse(pieces(MAX_BUFFERED + 1))
            case "stream":
                return StreamingResponse(pieces(3), media_type="text/event-stream")
            case "hold":
                self.entered.set()
                await self.go_on.wait()
            case "outage" if number == 1:
                await self.store.close()
        headers = {"Location": f"/made/{number}", "Set-Cookie": "a=b"}
        return JSONResponse({"number": number, "size": size}, 201, headers)


async def pieces(size: int) -> AsyncIterator[bytes]:
    for start in range(0, size, 65536):
        yield bytes(min(65536, size - start))


class Client:
    """Of one replica."""

    def __init__(self, app: ASGIApp, coordination: MemoryCoordination) -> None:
        self.app = app
        self.coordination = coordination
        self.http = httpx.AsyncClient(
            transport=InProcessTransport(app), base_url="http://atoll", timeout=60
        )

    async def post(
        self, order: str = "", key: str | None = "k", content: Any = b"body", query: str = ""
    ) -> httpx.Response:
        headers = {} if key is None else {"Idempotency-Key": key}
        url = f"/api/v1/{order}{query}"
        return await self.http.post(url, content=content, headers=headers)

    async def post_until_answered(self, order: str) -> httpx.Response:
        while (response := await self.post(order)).status_code == 409:
            assert response.json()["code"] == "idempotency_in_flight"
        return response


class World:
    """A store and a blob store, and replicas on them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.clock = ManualClock()
        self.store = SqlStore(
            [f"sqlite:///{place / 'atoll.db'}"],
            sqlite=SqliteSettings(),
            database=DatabaseSettings(),
        )
        self.blobs = LocalBlobs(place / "blobs")
        self.work = Work(self.store)
        self.common = MemoryState(self.clock)
        self.clients: list[Client] = []

    @property
    def done(self) -> int:
        return len(self.work.done)

    async def start(self) -> Client:
        """Another replica."""
        coordination = MemoryCoordination(
            ids.replica_id(), CoordinationSettings(), DAY, self.clock, state=self.common
        )
        await coordination.open()
        app = Idempotency(
            self.work,
            store=self.store,
            blobs=self.blobs,
            coordination=coordination,
            clock=self.clock,
            ttl=DAY,
        )
        client = Client(BodyLimit(app, limit=LIMIT, upload_limit=LIMIT), coordination)
        self.clients.append(client)
        return client

    async def pass_by(self, time: timedelta) -> None:
        """All live replicas send heartbeats."""
        alive = [c for c in self.clients if await c.coordination.alive(c.coordination.replica)]
        self.clock.time += time
        for client in alive:
            await client.coordination.heartbeat()

    async def lose(self, client: Client) -> None:
        """It sends no more heartbeats."""
        self.clients.remove(client)
        await client.http.aclose()
        await self.pass_by(PRESENCE)

    def blobs_kept(self) -> int:
        return sum(path.is_file() for path in (self.place / "blobs").rglob("*"))


@asynccontextmanager
async def a_world(place: Path) -> AsyncIterator[World]:
    world = World(place)
    await world.store.open()
    try:
        yield world
    finally:
        for client in world.clients:
            await client.http.aclose()
        await world.store.close()


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[World]:
    async with a_world(tmp_path) as world:
        yield world


@pytest.fixture
async def client(world: World) -> Client:
    return await world.start()


async def interrupted_request(
    world: World, client: Client, order: str = "hold", **options: Any
) -> None:
    """A request whose work is broken off in the middle, as a crash does it."""
    asked = asyncio.create_task(send_to(client.app, [b"body"], order, **options))
    await world.work.entered.wait()
    world.work.entered.clear()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked


async def send_to(
    app: ASGIApp, body: Iterable[bytes], order: str, *, key: str = "k", left: bool = False
) -> list[Message]:
    """What an application sends to a client that may leave in the middle of its body."""
    sent: list[Message] = []
    coming: list[Message] = [
        {"type": "http.request", "body": piece, "more_body": True} for piece in body
    ]
    if not left:
        coming[-1]["more_body"] = False
    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/api/v1/{order}",
        "query_string": b"",
        "headers": [(b"idempotency-key", key.encode())],
    }

    async def receive() -> Message:
        return coming.pop(0) if coming else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


def assert_problem(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["code"] == code


def replayed(response: httpx.Response) -> bool:
    return "idempotency-replayed" in response.headers


pytestmark = pytest.mark.anyio


# The same again


async def test_a_repeated_request_gets_the_first_response(client: Client, world: World) -> None:
    first, second = await client.post(), await client.post()

    assert first.status_code == second.status_code == 201
    assert first.json() == second.json() == {"number": 1, "size": 4}
    assert second.headers["location"] == "/made/1"
    assert second.headers["content-type"] == first.headers["content-type"]
    assert second.headers["content-length"] == first.headers["content-length"]
    assert "set-cookie" not in second.headers
    assert (replayed(first), replayed(second)) == (False, True)
    assert world.done == 1


async def test_any_replica_returns_the_first_response(client: Client, world: World) -> None:
    first = await client.post()
    other = await world.start()
    await world.lose(client)

    second = await other.post()
    assert replayed(second)
    assert second.content == first.content


async def test_without_a_key_every_request_is_served(client: Client, world: World) -> None:
    assert (await client.post(key=None)).json() != (await client.post(key=None)).json()
    assert world.work.done == [None, None]


async def test_a_key_is_ignored_on_other_methods(client: Client, world: World) -> None:
    for method in ("GET", "PUT", "DELETE"):
        await client.http.request(method, "/api/v1/x", headers={"Idempotency-Key": "k"})
    assert world.work.done == [None] * 3


async def test_a_key_is_ignored_on_paths_that_need_no_api_key(client: Client, world: World) -> None:
    await client.http.post("/docs", headers={"Idempotency-Key": "k"})
    assert world.work.done == [None]


async def test_keys_of_two_api_keys_are_separate(world: World) -> None:
    client = await world.start()

    async def of(owner: str) -> httpx.Response:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await client.app({**scope, "atoll.key": owner}, receive, send)

        transport = InProcessTransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://atoll", timeout=60
        ) as http:
            return await http.post("/api/v1/", headers={"Idempotency-Key": "k"})

    assert (await of("key_a")).json() != (await of("key_b")).json()
    assert replayed(await of("key_a"))


@pytest.mark.parametrize("value", ["", "a b", "ä", "x" * 256, "a\tb"], ids=ascii)
async def test_a_key_consists_of_few_visible_characters(client: Client, value: str) -> None:
    headers = [(b"Idempotency-Key", value.encode())]
    response = await client.http.post("/api/v1/", headers=headers)
    assert_problem(response, 422, "bad_idempotency_key")


async def test_the_longest_key_and_all_characters_are_allowed(client: Client) -> None:
    every = "".join(map(chr, range(0x21, 0x7F)))
    for key in (every, "x" * 255):
        assert (await client.post(key=key)).status_code == 201
        assert replayed(await client.post(key=key))


async def test_two_key_headers_are_refused(client: Client) -> None:
    headers = [(b"Idempotency-Key", b"a"), (b"Idempotency-Key", b"b")]
    response = await client.http.post("/api/v1/", headers=headers)
    assert_problem(response, 422, "bad_idempotency_key")


@pytest.mark.parametrize("order", ["broken", "unread", "large"])
async def test_errors_and_large_responses_are_recorded_too(
    client: Client, world: World, order: str
) -> None:
    first, second = await client.post(order), await client.post(order)

    assert first.status_code == second.status_code
    assert first.content == second.content
    assert first.headers.get("content-type") == second.headers.get("content-type")
    assert replayed(second)
    assert world.done == 1
    assert world.blobs_kept() == (order == "large")


@pytest.mark.parametrize("change", ["removed", "another", "huge"])
async def test_a_response_whose_blob_is_lost_or_changed_is_reported_as_lost(
    client: Client, world: World, change: str
) -> None:
    first = await client.post("large")
    [kept] = [path for path in (world.place / "blobs").rglob("*") if path.is_file()]
    if change == "removed":
        kept.unlink()
    elif change == "another":
        # Of the same length, as an attacker with write access to the store could put it there.
        kept.write_bytes(first.content[::-1])
    else:
        os.truncate(kept, 2**33)
    assert_problem(await client.post("large"), 500, "answer_lost")


# Another request with the same key


@pytest.mark.parametrize(
    "other",
    [{"content": b"Body"}, {"content": b""}, {"order": "x"}, {"query": "?a=1"}],
    ids=["body", "no body", "path", "query"],
)
async def test_a_different_request_with_the_key_is_refused(
    client: Client, world: World, other: dict[str, Any]
) -> None:
    await client.post()
    assert_problem(await client.post(**other), 422, "idempotency_key_reused")
    assert replayed(await client.post())
    assert world.done == 1


async def test_a_different_large_body_is_refused(client: Client) -> None:
    assert (await client.post(content=pieces(SMALL * 5))).status_code == 201
    assert replayed(await client.post(content=bytes(SMALL * 5)))
    response = await client.post(content=pieces(SMALL * 5 - 1))
    assert_problem(response, 422, "idempotency_key_reused")


async def test_a_body_that_the_application_did_not_read_is_compared_too(client: Client) -> None:
    first = await client.post("unread", content=pieces(SMALL * 5))
    assert first.status_code == 201
    assert replayed(await client.post("unread", content=pieces(SMALL * 5)))
    other = await client.post("unread", content=pieces(SMALL * 5 + 1))
    assert_problem(other, 422, "idempotency_key_reused")


# At the same time


async def test_one_of_two_concurrent_requests_is_served_and_the_other_must_retry(
    client: Client, world: World
) -> None:
    other = await world.start()
    first = asyncio.create_task(client.post("hold"))
    await world.work.entered.wait()
    for asked in (client, other):
        response = await asked.post("hold")
        assert_problem(response, 409, "idempotency_in_flight")
        assert response.headers["retry-after"] == "1"
        reused = await asked.post("hold", content=b"another")
        assert_problem(reused, 422, "idempotency_key_reused")
    world.work.go_on.set()

    assert (await first).status_code == 201
    assert replayed(await other.post("hold"))
    assert world.done == 1


async def test_one_of_many_concurrent_requests_is_served(client: Client, world: World) -> None:
    other = await world.start()
    asked = [(client, other)[n % 2].post() for n in range(20)]
    found = await asyncio.gather(*asked)

    assert {response.status_code for response in found} <= {201, 409}
    assert len({r.content for r in found if r.status_code == 201}) == 1
    assert world.done == 1


# Interrupted requests


async def test_a_request_of_a_lost_replica_is_served_again_with_the_same_seed(
    client: Client, world: World
) -> None:
    other = await world.start()
    await interrupted_request(world, client)
    assert_problem(await other.post("hold"), 409, "idempotency_in_flight")
    await world.lose(client)
    world.work.go_on.set()
    assert_problem(await other.post("hold", content=b"x"), 422, "idempotency_key_reused")

    assert (await other.post("hold")).status_code == 201
    assert replayed(await other.post("hold"))
    first, second = world.work.done
    assert first is not None
    assert first == second
    # Midnight has passed in between.
    assert ids.execution_id(first.at, first).startswith("exec_20261115_")


async def test_a_request_that_this_replica_aborted_is_served_again_by_it(
    client: Client, world: World
) -> None:
    await interrupted_request(world, client)
    world.work.go_on.set()

    assert (await client.post("hold")).status_code == 201
    first, second = world.work.done
    assert first == second


async def test_one_of_two_replicas_takes_over_from_a_lost_one(client: Client, world: World) -> None:
    others = [await world.start(), await world.start()]
    await interrupted_request(world, client)
    await world.lose(client)
    world.work.go_on.set()

    found = await asyncio.gather(*(other.post("hold") for other in others))
    assert sorted(response.status_code for response in found) in ([201, 201], [201, 409])
    assert world.done == 2


async def test_a_replica_that_returns_after_its_takeover_changes_nothing(
    client: Client, world: World
) -> None:
    other = await world.start()
    late = asyncio.create_task(client.post("hold"))
    await world.work.entered.wait()
    world.work.entered.clear()
    world.clients.remove(client)
    await world.pass_by(PRESENCE)
    await interrupted_request(world, other)
    world.work.go_on.set()
    assert (await late).json()["number"] == 1

    assert (await other.post("hold")).json()["number"] == 3
    assert replayed(await other.post("hold"))
    await client.http.aclose()


# Answers that are not kept


@pytest.mark.parametrize("order", ["session_busy", "instance_not_started", "node_full"])
async def test_a_temporary_refusal_frees_the_key_and_the_next_request_gets_new_ids(
    client: Client, world: World, order: str
) -> None:
    for _ in range(2):
        response = await client.post(order)
        assert response.json()["code"] == order
        assert not replayed(response)
        world.clock.time += timedelta(microseconds=1)
    first, second = world.work.done
    assert first != second
    assert (await client.post("other")).status_code == 201


@pytest.mark.parametrize("code", ["database_unavailable", "lease_lost"])
async def test_a_request_with_an_unknown_outcome_is_served_again_with_the_same_seed(
    client: Client, world: World, code: str
) -> None:
    other = await world.start()
    for asked in (client, other, client):
        assert_problem(await asked.post(code), 503, code)
        # Asked anew, it would have another seed from now on.
        world.clock.time += timedelta(microseconds=1)
    assert world.done == 3
    assert len(set(world.work.done)) == 1


@pytest.mark.parametrize("order", ["huge", "stream"])
async def test_a_response_that_cannot_be_recorded_is_produced_again_with_the_same_seed(
    client: Client, world: World, order: str
) -> None:
    for _ in range(2):
        response = await client.post_until_answered(order)
        assert response.content == bytes(MAX_BUFFERED + 1 if order == "huge" else 3)
        assert not replayed(response)
    first, second = world.work.done
    assert first == second
    assert world.blobs_kept() == 0


@pytest.mark.parametrize("size", [10, SMALL * 2], ids=["small", "large"])
async def test_a_client_that_left_before_its_body_was_complete_can_retry(
    client: Client, world: World, size: int
) -> None:
    await send_to(client.app, [bytes(size)], "x", left=True)
    assert world.done == (size > SMALL)

    response = await client.post("another")
    assert response.status_code == 201
    assert not replayed(response)


async def test_a_client_that_left_after_its_body_finds_its_response(
    client: Client, world: World
) -> None:
    with pytest.raises(TemporaryError):
        await client.http.post(
            "/api/v1/hold", content=b"body", headers={"Idempotency-Key": "k"}, timeout=0.01
        )
    world.work.go_on.set()
    response = await client.post_until_answered("hold")
    assert replayed(response)
    assert world.done == 1


@pytest.mark.parametrize("order", ["x", "unread"])
async def test_a_body_beyond_the_limit_leaves_the_key_free(client: Client, order: str) -> None:
    response = await client.post(order, content=pieces(LIMIT + 1))
    assert_problem(response, 413, "body_too_large")
    assert (await client.post("other")).status_code == 201


# Time


async def test_a_response_is_kept_until_it_expires(client: Client, world: World) -> None:
    await client.post()
    await world.pass_by(DAY - timedelta(seconds=1))
    assert replayed(await client.post())
    await world.pass_by(timedelta(seconds=1))

    again = await client.post(content=b"another")
    assert again.json()["number"] == 2
    assert not replayed(again)
    first, second = world.work.done
    assert first != second


async def test_the_sweep_deletes_expired_records_and_their_blobs(
    client: Client, world: World
) -> None:
    sweep = IdempotencyKeySweep(world.store, world.blobs, world.clock)
    old = IdempotencyRecord("", "x", world.clock.now() - DAY, world.clock.now())
    for number in range(BATCH * 2 + 1):
        await world.store.idempotency_records.claim(replace(old, id=str(number)))
    await client.post("large", key="a")
    await world.pass_by(timedelta(hours=1))
    await client.post("large", key="b")
    assert world.blobs_kept() == 2

    await world.pass_by(DAY - timedelta(hours=1))
    await sweep.once()
    assert world.blobs_kept() == 1
    assert await world.store.idempotency_records.expire(world.clock.now(), limit=1000) == []
    assert replayed(await client.post("large", key="b"))


# The database is unavailable


async def test_without_the_database_no_request_is_started(client: Client, world: World) -> None:
    await world.store.close()
    response = await client.post()
    assert_problem(response, 503, "database_unavailable")
    assert response.headers["retry-after"]
    assert world.done == 0


async def test_a_response_that_cannot_be_recorded_yet_reaches_the_client_and_is_recorded_later(
    client: Client, world: World
) -> None:
    first = await client.post("outage")
    assert first.status_code == 201
    assert_problem(await client.post("outage"), 503, "database_unavailable")
    await world.store.open()

    second = await client.post_until_answered("outage")
    assert replayed(second)
    assert second.json() == first.json()
    assert world.done == 1


async def test_a_response_that_could_not_be_recorded_is_produced_again_by_any_replica(
    client: Client, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "RECORD_DELAYS", (0.01, 0.01))
    assert (await client.post("outage")).status_code == 201
    await world.pass_by(timedelta(seconds=RECORD_TIMEOUT))
    await asyncio.sleep(0.1)  # It has tried once more.
    await world.store.open()

    # The first replica is alive, but no longer works on the request.
    other = await world.start()
    async with asyncio.timeout(30):
        second = await other.post_until_answered("outage")
    assert second.json()["number"] == 2
    assert replayed(await client.post("outage"))
    before, after = world.work.done
    assert before == after


# Size


async def test_a_large_upload_takes_little_memory(client: Client, world: World) -> None:
    size = 32 * 1024 * 1024
    assert (await client.post("warm", key="warm")).status_code == 201
    tracemalloc.start()
    try:
        assert (await client.post(content=pieces(size))).json()["size"] == size
        assert replayed(await client.post(content=pieces(size)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 1024 * 1024


# Any sequence of requests

KEYS = ["a", "b", "c"]
BODIES = {"one": b"1", "two": b"2", "large": b"3" * (SMALL + 1)}
"""By name: hypothesis warns of examples that are long to print."""
POSTS = st.tuples(
    st.just("post"),
    st.sampled_from(KEYS),
    st.sampled_from(sorted(BODIES)),
    st.sampled_from(["", "broken", "large", "session_busy", "database_unavailable"]),
)
STEPS = st.lists(
    POSTS
    | st.tuples(st.just("crash"), st.sampled_from(KEYS))
    | st.tuples(st.just("wait"), st.integers(1, 25)),
    max_size=25,
)
KEPT = ("", "broken", "large")


async def check_sequence(place: Path, steps: list[Any]) -> None:
    async with a_world(place) as world:
        work, clients = world.work, [await world.start(), await world.start()]
        known: dict[str, tuple[datetime, tuple[str, bytes], Any, Any]] = {}
        """By key: when it is over, the request, its seed, and its answer if there is one."""
        for turn, step in enumerate(steps):
            world.clock.time += timedelta(microseconds=1)
            client = clients[turn % 2]
            for key in [key for key, item in known.items() if item[0] <= world.clock.now()]:
                del known[key]
            match step:
                case ("wait", hours):
                    await world.pass_by(timedelta(hours=hours))
                case ("crash", key):
                    if key not in known:
                        over = world.clock.now() + DAY
                        await interrupted_request(world, client, key=key)
                        known[key] = (over, ("hold", b"body"), work.done[-1], None)
                        await world.lose(client)
                        clients[turn % 2] = await world.start()
                case ("post", key, name, order):
                    body = BODIES[name]
                    before, over = world.done, world.clock.now() + DAY
                    response = await client.post(order, key, body)
                    if key not in known:
                        assert world.done == before + 1
                        assert not replayed(response)
                        if order in KEPT:
                            known[key] = (over, (order, body), work.done[-1], response.content)
                        elif order == "database_unavailable":
                            known[key] = (over, (order, body), work.done[-1], None)
                        continue
                    over, request, seed, content = known[key]
                    large = len(request[1]) > SMALL or len(body) > SMALL
                    if content is not None:
                        assert world.done == before
                        if request == (order, body):
                            assert replayed(response)
                            assert response.content == content
                        else:
                            assert_problem(response, 422, "idempotency_key_reused")
                    elif request == (order, body):
                        assert world.done == before + 1
                        assert work.done[-1] == seed
                    elif not large:
                        assert world.done == before
                        assert_problem(response, 422, "idempotency_key_reused")
                    elif order in KEPT:
                        known[key] = (over, (order, body), seed, response.content)
                    elif order == "session_busy":
                        del known[key]
                    else:
                        known[key] = (over, (order, body), seed, None)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_any_sequence_of_requests(tmp_path_factory: pytest.TempPathFactory, steps: Any) -> None:
    with asyncio.Runner() as runner:
        runner.run(check_sequence(tmp_path_factory.mktemp("any"), steps))
