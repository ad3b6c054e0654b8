"""Events and their ids: a client that resumes receives exactly the remaining events."""

from __future__ import annotations

import base64
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem, read_events, until
from tests.e2e.test_recovery import calling, crash, kill_instance
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.quick

EventTuple = tuple[str, str, dict[str, Any]]
STEPS = 6
STEPWISE = """
import os, sys, time
for step in range({steps}):
    while not os.path.exists(f"go{{step}}"): time.sleep(0.005)
    print("out", step, flush=True)
    print("err", step, file=sys.stderr, flush=True)
"""
"""Prints a line to each output for each file that appears."""


@pytest.fixture
def own(bubblewrap: str, tmp_path: Path) -> Iterator[Server]:
    """A server for one test to kill."""
    env = {"ATOLL_POOL__SIZE": "1", "ATOLL_SHUTDOWN_TIMEOUT": "1", "ATOLL_LINK__HEARTBEAT": "0.1"}
    with Server(tmp_path, **env) as server:
        yield server


def all_of(api: Api, execution_id: str, after: str | None = None) -> list[EventTuple]:
    return [event for event in api.events(execution_id, after) if event[1] != "queued"]


def go(api: Api, session: str, steps: range) -> None:
    for step in steps:
        api.put(session, f"go{step}")


def listen_until(
    api: Api, execution_id: str, text: str, after: str | None = None
) -> list[EventTuple]:
    """Events up to a piece of output."""
    received: list[EventTuple] = []
    for event in api.events(execution_id, after):
        if event[1] != "queued":
            received.append(event)
            if text in event[2].get("text", ""):
                break
    return received


def check_resumed(api: Api, execution_id: str, expected: list[EventTuple]) -> None:
    """Every received id resumes the stream with exactly the remaining events."""
    numbers = [int(number) for number, _, _ in expected]
    assert numbers == sorted(set(numbers))
    assert all_of(api, execution_id) == expected
    for place, (number, _, _) in enumerate(expected):
        assert all_of(api, execution_id, number) == expected[place + 1 :]


def test_every_event_id_resumes_the_stream_during_and_after_the_execution(
    api: Api, server: Server, session: str
) -> None:
    execution_id = api.submit(session, STEPWISE.format(steps=STEPS))
    go(api, session, range(3))
    events = listen_until(api, execution_id, "err 2")
    with ThreadPoolExecutor(len(events) + 1) as threads:

        def rest(after: str | None) -> list[EventTuple]:
            with server.client() as http:
                return all_of(Api(http), execution_id, after)

        waiting = [threads.submit(rest, after) for after in (None, *(n for n, _, _ in events))]
        go(api, session, range(3, STEPS))
        heard_live = [each.result() for each in waiting]

    whole = heard_live[0]
    assert whole[: len(events)] == events
    assert heard_live[1:] == [whole[place + 1 :] for place in range(len(events))]
    assert [whole[0][1], whole[-1][1]] == ["started", "result"]
    check_resumed(api, execution_id, whole)


@pytest.mark.slow
def test_every_event_id_resumes_the_stream_on_a_server_that_was_killed(own: Server) -> None:
    with calling(own) as api:
        session = api.create()["id"]
        execution_id = api.submit(session, STEPWISE.format(steps=STEPS))
        go(api, session, range(2))
        events = listen_until(api, execution_id, "err 1")
    crash(own)
    with calling(own) as api:
        # All earlier events are replayed unchanged.
        assert listen_until(api, execution_id, "err 1") == events
        go(api, session, range(2, 4))
        events += listen_until(api, execution_id, "err 3", events[-1][0])
    crash(own)
    with calling(own) as api:
        go(api, session, range(4, STEPS))
        events += all_of(api, execution_id, events[-1][0])
        text = "".join(data["text"] for _, name, data in events if name == "stdout")
        assert text == "".join(f"out {step}\n" for step in range(STEPS))
        assert events[-1][1] == "result"
        check_resumed(api, execution_id, events)
    crash(own)
    with calling(own) as api:
        check_resumed(api, execution_id, events)


@pytest.mark.slow
def test_event_ids_continue_after_a_lost_attempt(own: Server) -> None:
    code = (
        "import os, time\nprint('begun', flush=True)\nopen('ran', 'a').write('x')\n"
        "while len(open('ran').read()) < 2: time.sleep(0.01)\nprint('over')"
    )
    with calling(own) as api:
        session = api.create()["id"]
        execution_id = api.submit(session, code)
        before = listen_until(api, execution_id, "begun")
        kill_instance(own, api, session)
        rest = all_of(api, execution_id, before[-1][0])
        retried, started = rest[:2]

        assert (retried[1], started[1]) == ("retry", "started")
        assert int(retried[0]) == 1 << 32
        assert (retried[2]["attempt"], retried[2]["cause"]) == (2, "instance_lost")
        assert {"message", "delay"} <= set(retried[2])
        assert started[2] == {"attempt": 2}
        numbers = [int(number) for number, _, _ in before + rest]
        assert numbers == sorted(set(numbers))
        # Events of the lost attempt are not sent to later clients.
        assert [event[1:] for event in all_of(api, execution_id)[1:]] == [e[1:] for e in rest[1:]]
        assert all_of(api, execution_id, retried[0]) == rest[1:]


def test_a_queued_event_counts_the_executions_ahead(api: Api, server: Server, session: str) -> None:
    first = api.submit(session, until("go"))
    others = [api.submit(session, until(f"go{n}")) for n in range(2)]
    last = api.submit(session, "print(1)")
    events = api.events(last)
    assert next(events) == ("", "queued", {"ahead": 3})
    for name, execution_id, ahead in (("go", first, 2), ("go0", others[0], 1)):
        api.put(session, name)
        api.result(execution_id)
        assert next(events) == ("", "queued", {"ahead": ahead})
    api.put(session, "go1")

    names = [name for _, name, _ in events if name != "queued"]
    assert names == ["started", "stdout", "result"]


def test_a_queued_execution_moves_up_when_an_earlier_one_is_cancelled(
    api: Api, session: str
) -> None:
    first = api.submit(session, until("go"))
    second = api.submit(session, "pass")
    events = api.events(api.submit(session, "print(1)"))
    assert next(events)[2] == {"ahead": 2}
    answer(api.http.post(f"{V1}/executions/{second}/cancel"))
    assert next(events) == ("", "queued", {"ahead": 1})
    api.put(session, "go")
    assert [name for _, name, _ in events][-1] == "result"
    assert api.result(first)["status"] == "success"


@pytest.mark.slow
def test_a_running_execution_sends_heartbeats(own: Server) -> None:
    with calling(own) as api:
        session = api.create()["id"]
        execution_id = api.submit(session, until("go") + "print(1)")
        beats = 0
        for number, name, data in api.events(execution_id, heartbeats=True):
            if name == "heartbeat":
                assert (number, data) == ("", {})
                beats += 1
                if beats == 3:
                    api.put(session, "go")
        assert beats >= 3
        # They are not part of the story.
        story = api.events(execution_id, heartbeats=True)
        assert "heartbeat" not in [name for _, name, _ in story]


@pytest.mark.parametrize("value", ["nonsense", "-1", "1.5", "", "1 2", "9" * 5000])
def test_an_invalid_event_id_is_refused(api: Api, session: str, value: str) -> None:
    execution_id = api.run(session, "print(1)")["execution_id"]
    url = f"{V1}/executions/{execution_id}/events"
    refused = problem(api.http.get(url, headers={"Last-Event-ID": value}), 422, "invalid_request")

    assert refused["errors"][0]["field"] == "header.last-event-id"


@pytest.mark.parametrize("value", [2**32 - 1, 2**63, 2**64, 2**100], ids=str)
def test_a_stream_from_a_future_event_id_is_empty(api: Api, session: str, value: int) -> None:
    execution_id = api.submit(session, until("go") + "print(1)")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(list, api.events(execution_id, str(value)))
        api.await_status(execution_id, "running")
        api.put(session, "go")
        assert [event for event in waiting.result() if event[1] != "queued"] == []

    assert list(api.events(execution_id, str(value))) == []


def test_output_is_streamed_unchanged_byte_by_byte(api: Api, session: str) -> None:
    code = "import sys\nfor n in range(256): sys.stdout.buffer.write(bytes([n]))\n"
    code += "sys.stdout.flush()\nsys.stderr.buffer.write('ä'.encode()[:1])"
    execution_id = api.submit(session, code)
    for _ in range(2):  # As it comes, and from the record.
        outputs = {"stdout": b"", "stderr": b""}
        for _, name, data in api.events(execution_id):
            if name in outputs:
                assert len(data) == 1
                outputs[name] += (
                    base64.b64decode(data["base64"]) if "base64" in data else data["text"].encode()
                )
        assert outputs == {"stdout": bytes(range(256)), "stderr": "ä".encode()[:1]}


def test_ten_thousand_small_writes_are_streamed_in_order(api: Api, session: str) -> None:
    code = "import os\nfor n in range(10_000): os.write(1, b'%d\\n' % n)"
    execution_id = api.submit(session, code)
    live = all_of(api, execution_id)
    text = "".join(data["text"] for _, name, data in live if name == "stdout")

    assert text == "".join(f"{n}\n" for n in range(10_000))
    assert all_of(api, execution_id) == live
    middle = live[len(live) // 2][0]
    assert all_of(api, execution_id, middle) == live[len(live) // 2 + 1 :]


# Readers that do not read


def memory(pid: int) -> int:
    """Bytes of a process that are in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(pid)


def open_unread(server: Server, path: str) -> socket.socket:
    """A connection that has sent a request and does not read the response."""
    address = httpx.URL(server.url)
    connection = socket.create_connection((address.host, address.port or 80), timeout=30)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = f"GET {path} HTTP/1.1\r\nHost: atoll\r\nAuthorization: Bearer {server.key}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


@pytest.mark.slow
def test_readers_that_do_not_read_delay_nothing_and_use_no_memory(
    bubblewrap: str, tmp_path: Path
) -> None:
    limit = 8 * 1024 * 1024
    with (
        Server(tmp_path, ATOLL_EXECUTION__OUTPUT_LIMIT=str(limit)) as own,
        calling(own) as api,
    ):
        api.http.timeout = 120
        session = api.create(timeout=300)["id"]
        api.run(session, "print(1)")
        assert own.process is not None
        before = memory(own.process.pid)
        code = until("go") + "import os\nfor _ in range(1600): os.write(1, b'x' * 65536)"
        execution_id = api.submit(session, code, timeout=120)
        readers = [open_unread(own, f"{V1}/executions/{execution_id}/events") for _ in range(50)]
        try:
            api.await_status(execution_id, "running")
            api.put(session, "go")
            result = api.result(execution_id, wait=100)
            grown = memory(own.process.pid) - before
        finally:
            for reader in readers:
                reader.close()
        assert (result["status"], result["stdout_bytes"]) == ("success", 1600 * 65536)
        assert result["execution_time"] < 60
        # The output once, some copies of it on its way to the record, and little for each reader.
        assert grown < 15 * limit, grown


@pytest.mark.slow
def test_the_connection_of_a_reader_that_left_is_closed(own: Server) -> None:
    with calling(own) as api:
        session = api.create()["id"]
        execution_id = api.submit(session, until("go") + "print(1)")
        api.await_status(execution_id, "running")
        readers = [open_unread(own, f"{V1}/executions/{execution_id}/events") for _ in range(20)]
        for reader in readers:
            assert reader.recv(10)
            reader.close()
        assert own.process is not None
        files = Path(f"/proc/{own.process.pid}/fd")

        def is_socket(fd: Path) -> bool:
            try:
                return "socket" in str(fd.readlink())
            except FileNotFoundError:
                return False  # Closed by now.

        # Connections to the server that it has not closed.
        eventually(lambda: sum(map(is_socket, files.iterdir())) < 20)
        api.put(session, "go")
        assert api.result(execution_id)["stdout"] == "1\n"


def test_the_stream_of_an_unknown_execution_is_not_found(api: Api) -> None:
    with api.http.stream("GET", f"{V1}/executions/exec_nobody/events") as response:
        response.read()
        problem(response, 404, "execution_not_found")
        assert list(read_events(response)) == []
