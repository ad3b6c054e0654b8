"""One feed and one delivery of each event, whichever replicas there are and whichever is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.api import V1, Api, answer, eventually, read_events
from tests.integration.replicas import LONG, Cluster, concurrently
from tests.integration.test_replicas import new_database
from tests.servers.receiver import Receiver

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAM = {"accept": "text/event-stream"}


@pytest.fixture(scope="module", params=["mariadb", "postgresql"])
def shared(
    request: pytest.FixtureRequest, bubblewrap: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with Cluster(
        tmp_path_factory.mktemp("replicas"),
        size=2,
        database_url=new_database(request.param, request),
        ATOLL_EVENT__WEBHOOK_PRIVATE="true",
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """Two members, whose death the next test does not notice."""
    return shared.start()


@pytest.fixture
def session(cluster: Cluster) -> Iterator[str]:
    session_id = str(cluster[0].api.create(timeout=600)["id"])
    yield session_id
    cluster.start()[0].api.end(session_id)


def page(api: Api, **asked: Any) -> dict[str, Any]:
    return answer(api.http.get(f"{V1}/events", params=asked))


def feed(api: Api, after: int) -> list[dict[str, Any]]:
    """All events after a position."""
    found: list[dict[str, Any]] = []
    while items := (reported := page(api, after=after, limit=500))["items"]:
        found += items
        after = reported["after"]
    return found


def test_both_replicas_return_the_same_events_in_the_same_order(
    cluster: Cluster, session: str
) -> None:
    a, b = cluster.apis
    before = page(a, after="end")["after"]

    def some(member: int) -> list[str]:
        with cluster[member].calling() as api:
            return [api.run(session, "1")["execution_id"] for _ in range(15)]

    done = concurrently(lambda: some(0), lambda: some(1))

    items = feed(a, before)
    assert items == feed(b, before)
    numbers = [one["number"] for one in items]
    assert numbers == list(range(before + 1, before + 1 + len(numbers)))
    ends = [one["subject"] for one in items if one["type"] == "execution.completed"]
    assert sorted(ends) == sorted([*done[0], *done[1]])
    for own in done:
        assert [one for one in ends if one in own] == own


def test_events_of_one_replica_are_followed_and_resumed_on_the_other(
    cluster: Cluster, session: str
) -> None:
    a, b = cluster.apis
    place = str(page(a, after="end")["after"])
    seen: list[tuple[str, str]] = []
    for listener, worker in ((1, a), (0, b), (1, a)):
        with (
            cluster[listener].calling() as api,
            api.http.stream(
                "GET",
                f"{V1}/events",
                params={"types": "execution.*"},
                headers={**STREAM, "last-event-id": place},
            ) as response,
        ):
            events = read_events(response)
            execution_id = worker.run(session, "1")["execution_id"]
            for _ in range(2):
                place, name, content = next(events)
                seen.append((name, content["subject"]))
                assert content["subject"] == execution_id

    assert [name for name, _ in seen] == ["execution.submitted", "execution.completed"] * 3


def test_events_stored_by_a_killed_replica_keep_their_position(
    cluster: Cluster, session: str
) -> None:
    a, b = cluster.apis
    before = page(b, after="end")["after"]
    submitted = [a.submit(session, "1") for _ in range(8)]
    cluster[0].kill()
    for execution_id in submitted:
        assert answer(b.http.get(f"{V1}/executions/{execution_id}/result?wait={LONG}"))

    items = feed(b, before)

    of_these = [one for one in items if one["type"] == "execution.submitted"]
    assert [one["subject"] for one in of_these] == submitted
    ends = [one["subject"] for one in items if one["type"] == "execution.completed"]
    assert sorted(ends) == sorted(submitted)


def test_a_webhook_continues_when_the_replica_that_served_it_is_killed(
    cluster: Cluster, session: str
) -> None:
    """
    Each event once while both live; after a kill the last ones may be repeated, but none is lost.
    """
    with Receiver() as receiver:
        body = {"url": receiver.url, "types": ["execution.completed"]}
        made = answer(cluster[0].api.http.post(f"{V1}/webhooks", json=body), 201)
        first = [cluster[n % 2].api.run(session, "1")["execution_id"] for n in range(6)]
        received = receiver.wait_for(6)
        assert [one.event["subject"] for one in received] == first
        for victim in (0, 1):
            cluster.start()
            cluster[victim].kill()
            other = cluster[1 - victim].api
            ran = [other.run(session, "1")["execution_id"] for _ in range(2)]

            def has_arrived(ran: list[str] = ran) -> bool:
                subjects = [one.event["subject"] for one in receiver.received]
                return all(one in subjects for one in ran)

            eventually(has_arrived, LONG)
        once = list(dict.fromkeys(one.event["number"] for one in receiver.received))
        assert once == sorted(once)
        assert len(once) == 10
        ids = {one.headers["webhook-id"] for one in receiver.received}
        assert ids == {f"{made['id']}_{number}" for number in once}
        cluster.start()
        gone = cluster[0].api.http.delete(f"{V1}/webhooks/{made['id']}")
        assert gone.status_code == 204
