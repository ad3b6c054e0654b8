"""The feed of events through REST, the SDK and the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from atoll import AsyncAtoll, Atoll
from atoll.errors import Conflict
from atoll.reconcile import events
from tests import preloaded
from tests.e2e.api import V1, Api, answer, eventually, problem, read_events
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.quick

STREAM = {"accept": "text/event-stream"}


def page(api: Api, **asked: Any) -> dict[str, Any]:
    return answer(api.http.get(f"{V1}/events", params=asked))


def last_number(api: Api) -> int:
    return int(page(api, after="end")["after"])


LASTS = "execution.running"
"""The event of a long execution; on a busy machine any execution may cause it."""


def types(items: list[dict[str, Any]]) -> list[str]:
    return [item["type"] for item in items if item["type"] != LASTS]


def of_session(session: str, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without those of earlier tests, which may be listed at any time."""
    return [item for item in items if item["data"].get("session_id") == session]


@contextmanager
def following(
    api: Api, after: str | None = None, **asked: Any
) -> Iterator[Iterator[tuple[str, str, dict[str, Any]]]]:
    headers = STREAM if after is None else {**STREAM, "last-event-id": after}
    with api.http.stream("GET", f"{V1}/events", params=asked, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (event for event in read_events(response) if event[1] != LASTS)


def test_events_of_an_execution_are_in_order(api: Api, session: str) -> None:
    before = last_number(api)
    done = api.run(session, "print('not for the feed')")
    failed = api.run(session, "raise SystemExit(3)")

    found = of_session(session, page(api, after=before, types="execution.*")["items"])

    assert types(found) == [
        "execution.submitted",
        "execution.completed",
        "execution.submitted",
        "execution.failed",
    ]
    assert [item["subject"] for item in found if item["type"] != LASTS] == [
        done["execution_id"],
        done["execution_id"],
        failed["execution_id"],
        failed["execution_id"],
    ]
    last = found[-1]
    assert last["data"]["status"] == "failed"
    assert last["data"]["cause"] == "exit"
    assert "not for the feed" not in json.dumps(found)
    numbers = [item["number"] for item in page(api, after=before)["items"]]
    assert numbers == list(range(before + 1, before + 1 + len(numbers)))


def test_template_changes_are_events(api: Api) -> None:
    before = last_number(api)
    answer(api.http.post(f"{V1}/templates", json={"id": "told", "name": "a"}), 201)
    answer(api.http.put(f"{V1}/templates/told", json={"name": "b"}))
    assert api.http.delete(f"{V1}/templates/told").status_code == 204

    found = page(api, after=before, subject="told")["items"]

    assert types(found) == ["template.created", "template.changed", "template.removed"]
    assert [item["data"]["version"] for item in found] == [1, 2, 2]


def test_pages_follow_each_other_without_a_gap(api: Api, session: str) -> None:
    before = last_number(api)
    for _ in range(3):
        api.run(session, "1")

    place, numbers = before, []
    while items := (found := page(api, after=place, limit=2))["items"]:
        numbers += [item["number"] for item in items]
        place = found["after"]

    assert numbers == list(range(before + 1, before + 1 + len(numbers)))
    assert len(numbers) >= 6


def test_a_waiting_page_returns_with_the_first_event(
    server: Server, api: Api, session: str
) -> None:
    asked = {"after": last_number(api), "types": "execution.submitted", "wait": 30}
    with ThreadPoolExecutor(1) as threads, server.client() as other:
        waiting = threads.submit(page, Api(other), **asked)
        api.run(session, "1")
        found = waiting.result(30)

    assert types(found["items"]) == ["execution.submitted"]


def test_a_page_without_events_returns_after_its_wait(api: Api) -> None:
    before = last_number(api)
    found = page(api, after=before, types="node.never", wait=0.05)

    assert found["items"] == []
    assert found["after"] >= before


def test_a_stream_sends_events_and_resumes_where_it_stopped(
    server: Server, api: Api, session: str
) -> None:
    with server.client() as http:
        before = str(last_number(api))
        with following(Api(http), before, types="execution.*") as events:
            api.run(session, "1")
            number, name, content = next(
                event for event in events if of_session(session, [event[2]])
            )
        assert name == "execution.submitted"
        assert content["number"] == int(number)
        api.run(session, "2")
        with following(Api(http), number, types="execution.*") as events:
            mine = (name for _, name, content in events if of_session(session, [content]))
            names = [next(mine) for _ in range(3)]

    assert names == ["execution.completed", "execution.submitted", "execution.completed"]


def test_a_stream_sends_its_position_before_the_first_event(server: Server, api: Api) -> None:
    # Events of earlier tests may be listed at any time.
    before = last_number(api)
    with (
        server.client() as http,
        http.stream("GET", f"{V1}/events", params={"after": "end"}, headers=STREAM) as response,
    ):
        first = next(response.iter_lines())

    assert first.startswith("id: ")
    assert before <= int(first.removeprefix("id: ")) <= last_number(api)


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        pytest.param({"types": "session"}, "invalid_request", id="no type"),
        pytest.param({"types": "Session.*"}, "invalid_request", id="capital"),
        pytest.param({"types": "a.b," * 40 + "a.b"}, "invalid_request", id="too many"),
        pytest.param({"types": ""}, "invalid_request", id="empty"),
        pytest.param({"after": "-1"}, "invalid_request", id="negative"),
        pytest.param({"after": str(2**64)}, "invalid_request", id="huge"),
        pytest.param({"limit": "0"}, "invalid_request", id="no limit"),
        pytest.param({"wait": "3600"}, "invalid_request", id="long wait"),
        pytest.param({"subject": "x" * 65}, "invalid_request", id="long subject"),
    ],
)
def test_an_invalid_query_is_refused(api: Api, asked: dict[str, str], code: str) -> None:
    problem(api.http.get(f"{V1}/events", params=asked), 422, code)


@pytest.mark.parametrize("place", ["x", "-1", "1.5", str(2**63), "٣"])
def test_a_last_event_id_that_is_not_a_number_is_refused(api: Api, place: str) -> None:
    headers = {**STREAM, "last-event-id": place.encode()}
    problem(
        api.http.get(f"{V1}/events", headers=headers),  # type: ignore[arg-type]
        422,
        "invalid_request",
    )


def test_an_unknown_position_differs_from_one_to_wait_at(api: Api) -> None:
    place = last_number(api) + 1000
    error = problem(api.http.get(f"{V1}/events", params={"after": place}), 410, "events_expired")
    assert error["first"] >= 1
    problem(
        api.http.get(f"{V1}/events", params={"after": place}, headers=STREAM), 410, "events_expired"
    )


def test_a_read_only_key_can_follow_the_feed(server: Server, api: Api) -> None:
    options = ["--scope", "read", "--json", "--data-dir", str(server.data_dir)]
    made = preloaded.run("key", "create", *options, "reader")
    headers = {"authorization": f"Bearer {json.loads(made.stdout)['key']}"}

    # A key created by another process becomes valid within seconds.
    eventually(lambda: api.http.get(f"{V1}/events", headers=headers).status_code == 200)
    problem(api.http.get(f"{V1}/webhooks", headers=headers), 403, "key_read_only")


@pytest.mark.slow
@pytest.mark.anyio
async def test_the_sdk_resumes_the_feed_when_the_server_restarts(
    bubblewrap: str, tmp_path: Path
) -> None:
    """Killed in between: no event is repeated or lost."""
    server = Server(tmp_path, ATOLL_POOL__SIZE="0").start()
    port = server.url.rsplit(":", 1)[1]
    try:
        with server.client() as http:
            api = Api(http)
            session_id = api.create()["id"]
            async with AsyncAtoll(server.url, api_key=server.key) as atoll:
                events = atoll.events.follow(types=["execution.*"], after="start")
                api.run(session_id, "1")
                seen = [await anext(events) for _ in range(2)]
                execution_id = api.submit(session_id, "import time; time.sleep(0.2)")
                seen.append(await anext(events))
                server.stop(signal.SIGKILL)
                server._arguments = ("--port", port)
                server.start()
                seen.append(await anext(events))
                while seen[-1].type != "execution.completed":
                    seen.append(await anext(events))
                assert seen[-1].subject == execution_id
                numbers = [one.number or 0 for one in seen]
                assert numbers == sorted(set(numbers))
                kept = [one async for one in atoll.events.list(types=["execution.*"])]
                assert seen == kept
                api.end(session_id)
    finally:
        if server.process is not None:
            server.stop()


@pytest.mark.slow
def test_every_accepted_execution_has_an_event_even_after_a_kill(
    bubblewrap: str, tmp_path: Path
) -> None:
    with Server(tmp_path) as server:
        with server.client() as http:
            api = Api(http)
            session_id = api.create()["id"]
            submitted = [api.submit(session_id, "1") for _ in range(20)]
        server.stop(signal.SIGKILL)
        with server.start().client() as http:
            api = Api(http)
            for execution_id in submitted:
                api.result(execution_id)
            found = page(api, types="execution.*", limit=500)["items"]
            received = [(item["type"], item["subject"]) for item in found]
            assert [one for type_, one in received if type_ == "execution.submitted"] == submitted
            ends = [one for type_, one in received if type_ == "execution.completed"]
            assert sorted(ends) == sorted(submitted)
            assert len(set(ends)) == len(submitted)


@pytest.mark.slow
def test_events_are_deleted_after_the_retention_time(bubblewrap: str, tmp_path: Path) -> None:
    with Server(tmp_path, ATOLL_POOL__SIZE="0") as server, server.client() as http:
        api = Api(http)
        session_id = api.create()["id"]
        for _ in range(3):
            api.run(session_id, "1")
        last = last_number(api)
        api.end(session_id)
        server.stop()
        server._env = {**server._env, "ATOLL_EVENT__KEEP": "0"}
        server.with_constants({f"{events.__name__}.SWEEP_INTERVAL": 0.1})
        server.start()
        with server.client() as again:
            api = Api(again)

            def forgotten() -> bool:
                return again.get(f"{V1}/events", params={"after": 0}).status_code == 410

            eventually(forgotten)
            error = problem(again.get(f"{V1}/events", params={"after": 0}), 410, "events_expired")
            assert error["first"] > 1
            assert page(api)["after"] >= last
            with Atoll(server.url, api_key=server.key) as atoll:
                with pytest.raises(Conflict, match="Position 0 is not in the feed") as refused:
                    next(iter(atoll.events.follow(after=0)))
                assert refused.value.code == "events_expired"


def test_the_command_prints_past_events_and_follows(server: Server, api: Api, session: str) -> None:
    before = last_number(api)
    first = api.run(session, "1")["execution_id"]
    options = ["--url", server.url, "--api-key", server.key]
    command = [sys.executable, "-m", "atoll.cli", "events", *options]

    wanted = ["--after", str(before), "--types", "execution.*", "--json"]
    shown = server.atoll("events", *wanted)
    content = [json.loads(line) for line in shown.stdout.splitlines()]
    assert types(of_session(session, content)) == ["execution.submitted", "execution.completed"]

    with subprocess.Popen(
        [*command, "--follow", "--after", str(before), "--types", "execution.completed"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert "execution.completed" in next(line for line in process.stdout if first in line)
            second = api.run(session, "1")["execution_id"]
            assert "execution.completed" in next(line for line in process.stdout if second in line)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()


def test_a_server_that_shuts_down_closes_streams_of_the_feed(
    bubblewrap: str, tmp_path: Path
) -> None:
    with (
        Server(tmp_path, ATOLL_POOL__SIZE="0", ATOLL_SHUTDOWN_TIMEOUT="250") as server,
        server.client() as http,
        http.stream("GET", f"{V1}/events", headers=STREAM) as response,
    ):
        assert response.status_code == 200
        assert server.stop() == 0
        response.read()
