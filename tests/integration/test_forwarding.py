"""Any control plane answers for every session: two nodes, one database, one Redis."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem, read_events, until
from tests.e2e.console import begin, console, refusal
from tests.integration.nodes import Fleet
from tests.integration.replicas import LONG, Member

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.s3 import S3Server

MiB = 1 << 20
SHELL = {"rows": 24, "cols": 80}


class Pair(Fleet):
    """Two nodes, each with a unique label."""

    def __init__(self, place: Path, *, blobs: dict[str, str] | None = None, **env: Any) -> None:
        super().__init__(place, blobs=blobs, of_node=_labelled, **env)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            for asked, other in ((0, 1), (1, 0)):
                eventually(lambda asked=asked, other=other: self._can_place(asked, other), LONG)  # type: ignore[misc]
        except BaseException:
            self._abandon()
            raise
        return self

    def _can_place(self, asked: int, other: int) -> bool:
        """Whether a request to one node can create a session on the other."""
        api = self[asked].api
        body = {"node_labels": {"place": str(other)}}
        made = api.http.post(f"{V1}/sessions", json=body)
        if made.status_code == 201:
            api.end(made.json()["id"])
        return made.status_code == 201

    def on(self, number: int, **fields: Any) -> str:
        """A session of that node."""
        made = self[number].api.create(node_labels={"place": str(number)}, **fields)
        assert made["runtime_node"] == self[number].id
        return str(made["id"])

    @property
    def apis(self) -> tuple[Api, Api]:
        return self[0].api, self[1].api


def _labelled(number: int) -> dict[str, str]:
    return {"ATOLL_NODE__LABELS": json.dumps({"place": str(number)})}


@pytest.fixture(scope="module")
def shared(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("nodes")) as pair:
        yield pair


@pytest.fixture
def pair(shared: Pair) -> Pair:
    return shared


def test_an_execution_on_one_node_is_requested_from_the_other(pair: Pair) -> None:
    a, b = pair.apis
    session = pair.on(0)
    assert b.run(session, "print(6 * 7)")["stdout"] == "42\n"
    execution = b.submit(session, until("go"))
    b.await_status(execution, "running")
    b.put(session, "go")
    assert b.result(execution)["status"] == "success"
    assert b.execution(execution)["session_id"] == session
    assert a.names(session) == b.names(session) == ["go"]
    problem(b.http.get(f"{V1}/executions/{execution}/nothing"), 404, "not_found")
    assert b.end(session)["status"] == "terminated"
    problem(b.execute(session, code="1"), 409, "session_ended")


def test_events_are_forwarded_as_they_arrive(pair: Pair) -> None:
    _, b = pair.apis
    session = pair.on(0)
    execution = b.submit(session, f"print('first', flush=True)\n{until('go')}print('last')")
    received = []
    for number, name, content in b.events(execution):
        received.append((number, name))
        if name == "stdout" and "first" in content["text"]:
            # Received while it runs: only then it may end.
            b.put(session, "go")
    assert received[-1][1] == "result"
    seen = next(number for number, name in received if name == "stdout")
    rest = [(number, name) for number, name, _ in b.events(execution, seen)]
    assert rest == received[[number for number, _ in received].index(seen) + 1 :]
    b.end(session)


def test_an_invocation_is_forwarded_to_the_node_of_its_session(pair: Pair) -> None:
    a, b = pair.apis
    session = pair.on(0)
    body = {"session_id": session, "code": "print('x' * 10)", "mode": "stream"}
    with b.http.stream("POST", f"{V1}/invocations", json=body) as response:
        events = list(read_events(response))
    assert events[0][1] == "accepted"
    assert events[-1][1] == "result"
    invocation = events[0][2]["invocation_id"]
    assert answer(b.http.get(f"{V1}/invocations/{invocation}"))["status"] == "succeeded"
    running = {"session_id": session, "code": until("never"), "mode": "async"}
    invocation = answer(b.http.post(f"{V1}/invocations", json=running), 202)["invocation_id"]
    ended = answer(b.http.post(f"{V1}/invocations/{invocation}/cancel"))
    assert ended["status"] == "cancelled"
    assert answer(a.http.get(f"{V1}/invocations/{invocation}"))["status"] == "cancelled"
    b.end(session)


def test_files_of_any_size_are_forwarded_both_ways(pair: Pair) -> None:
    a, b = pair.apis
    session = pair.on(0)
    content = os.urandom(4 * MiB)
    digest = hashlib.sha256(content).hexdigest()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(content), 100_000):
            yield content[start : start + 100_000]

    # With a length, and in chunks without one.
    path = f"{V1}/sessions/{session}/files"
    answer(b.http.put(f"{path}/with", content=content), 201)
    answer(b.http.put(f"{path}/without", content=pieces()), 201)
    form = {"file": ("form", content)}
    assert b.http.post(f"{path}/upload", files=form).status_code in (200, 201)
    for name in ("with", "without", "form"):
        got = b.http.get(f"{path}/{name}")
        assert hashlib.sha256(got.content).hexdigest() == digest, name
        assert got.headers["content-length"] == str(len(content))
    part = b.http.get(f"{path}/with", headers={"Range": "bytes=5-9"})
    assert part.status_code == 206
    assert part.content == content[5:10]
    assert b.http.head(f"{path}/with").headers["content-length"] == str(len(content))
    # Names that a client would put in order.
    odd = "a%2F..%2Fb%20%25%C3%A4"
    answer(b.http.put(f"{path}/{odd}", content=b"1"), b.http.put(f"{path}/{odd}").status_code)
    assert a.names(session) == b.names(session)
    b.end(session)
    # What an ended session leaves is where it was.
    eventually(lambda: b.http.get(f"{path}/with").content == content)


def test_a_signed_link_works_at_every_node(pair: Pair) -> None:
    a, b = pair.apis
    session = pair.on(0)
    b.put(session, "f", b"content")
    body = {"path": "f", "method": "GET"}
    link = answer(b.http.post(f"{V1}/sessions/{session}/files/presign", json=body))["url"]
    assert link.startswith(pair[1].url), "the client's own way here"
    assert httpx.get(link, timeout=60).content == b"content"
    there = link.replace(pair[1].url, pair[0].url)
    assert httpx.get(there, timeout=60).content == b"content"
    body = {"path": "g", "method": "PUT"}
    link = answer(b.http.post(f"{V1}/sessions/{session}/files/presign", json=body))["url"]
    assert httpx.put(link, content=b"x" * MiB, timeout=60).status_code == 201
    assert a.names(session) == ["f", "g"]
    problem(httpx.get(link, timeout=60), 403, "signed_url_invalid")
    b.end(session)


def test_a_console_can_be_opened_at_the_other_node(pair: Pair) -> None:
    _, b = pair.apis
    session = pair.on(0)
    execution = begin(b, session, terminal=SHELL)
    with console(b, execution, query={"format": "json"}) as there:
        there.ready().send("echo fi''rst\n").until("first\r\n")
        there.send_message(type="nonsense").refused("bad_message")
        position = there.position
        there.send_message(type="close")
        assert there.closed() == (1000, "detached")
    with console(b, execution, query={"after": position}, subprotocols=["atoll.console"]) as there:
        assert there.socket.subprotocol == "atoll.console"
        there.ready().send("exit 5\n")
        assert there.ended()["exit_code"] == 5
    assert b.result(execution)["exit_code"] == 5
    b.end(session)


def test_a_page_of_another_origin_is_refused_by_the_first_node(pair: Pair) -> None:
    _, b = pair.apis
    session = pair.on(0)
    execution = begin(b, session, terminal=SHELL)
    evil = {"Origin": "https://evil.example"}
    assert refusal(b, execution, headers=evil) == (403, "origin_refused")
    with console(b, execution, headers={"Origin": pair[1].url}) as there:
        there.ready().send_message(type="close", end=True)
        there.closed()
    assert refusal(b, execution, key="wrong") == (401, "key_unknown")
    assert refusal(b, execution, query={"mode": "odd"}) == (422, "invalid_request")
    b.end(session)


def test_a_cancellation_is_forwarded(pair: Pair) -> None:
    _, b = pair.apis
    session = pair.on(0)
    execution = b.submit(session, until("never"))
    b.await_status(execution, "running")
    assert answer(b.http.post(f"{V1}/executions/{execution}/cancel"))["status"] == "cancelled"
    done = b.submit(session, "1")
    b.result(done)
    problem(b.http.post(f"{V1}/executions/{done}/cancel"), 409, "execution_ended")
    b.end(session)


def test_refusals_are_forwarded_unchanged(pair: Pair) -> None:
    a, b = pair.apis
    session = pair.on(0)
    cases: list[tuple[str, str, Any]] = [
        ("GET", f"/sessions/{session}/files/nothing", None),
        ("GET", f"/sessions/{session}/contexts/nothing", None),
        ("POST", f"/sessions/{session}/execute", {"code": 5}),
        ("POST", f"/sessions/{session}/execute", {"code": "1", "context_id": "none"}),
        ("POST", f"/sessions/{session}/nothing", {}),
        ("PUT", f"/sessions/{session}/files/a/../../b", {}),
        ("POST", "/sessions/ses_nothing/execute", {"code": "1"}),
        ("POST", "/invocations", {"session_id": "ses_nothing", "code": "1"}),
        ("POST", "/invocations", {"session_id": 5}),
        ("POST", "/sessions", {"template_id": "nothing"}),
        ("POST", "/sessions", {"nothing": 1}),
    ]
    for method, path, body in cases:
        here, there = (one.http.request(method, V1 + path, json=body) for one in (a, b))
        assert here.status_code >= 400, path
        assert (there.status_code, there.content) == (here.status_code, here.content), path
        assert there.headers["content-type"] == here.headers["content-type"]
    b.end(session)


def test_a_body_beyond_the_limit_is_refused_by_the_first_node(pair: Pair) -> None:
    _, b = pair.apis
    session = pair.on(0)

    def pieces() -> Iterator[bytes]:
        for _ in range(90):
            yield b" " * 100_000

    path = f"{V1}/sessions/{session}/execute"
    problem(b.http.post(path, content=pieces()), 413, "body_too_large")
    problem(b.http.post(path, content=b" " * (9 * MiB)), 413, "body_too_large")
    b.end(session)


def test_a_client_that_disconnects_ends_the_forwarded_request(pair: Pair) -> None:
    _, b = pair.apis
    session = pair.on(0)
    execution = b.submit(session, until("never"))
    paths = (f"sessions/{session}/files/watch?path=", f"executions/{execution}/events")
    with ExitStack() as streams:
        for path in paths * 4:
            opened = b.http.stream("GET", f"{V1}/{path}", timeout=LONG)
            assert streams.enter_context(opened).status_code == 200
        waiting = b.http.stream("GET", f"{V1}/executions/{execution}/result?wait=60", timeout=0.5)
        with pytest.raises(httpx.ReadTimeout):
            streams.enter_context(waiting)
        assert connections(pair[1], pair[0]) >= 8
    # A used connection is closed with its client; one or two idle ones are kept.
    eventually(lambda: connections(pair[1], pair[0]) <= 2)
    b.end(session)


def connections(of: Member, to: Member) -> int:
    """How many connections a node has to another one."""
    sockets = set()
    for fd in Path(f"/proc/{of.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            sockets.add(os.readlink(fd))
    port = int(to.url.rpartition(":")[2])
    found = 0
    for line in Path(f"/proc/{of.pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        established, there = fields[3] == "01", int(fields[2].rpartition(":")[2], 16)
        found += established and there == port and f"socket:[{fields[9]}]" in sockets
    return found


def test_an_idempotency_key_is_valid_at_both_nodes(pair: Pair) -> None:
    a, b = pair.apis
    key = {"Idempotency-Key": uuid.uuid4().hex}
    body = {"node_labels": {"place": "0"}}
    first = b.http.post(f"{V1}/sessions", json=body, headers=key)
    again = [one.http.post(f"{V1}/sessions", json=body, headers=key) for one in (a, b)]
    assert first.status_code == 201
    assert [answer(one, 201)["id"] for one in again] == [first.json()["id"]] * 2
    assert all(one.headers["idempotency-replayed"] == "true" for one in again)
    other = b.http.post(f"{V1}/sessions", json={}, headers=key)
    problem(other, 422, "idempotency_key_reused")
    session = first.json()["id"]
    key = {"Idempotency-Key": uuid.uuid4().hex}
    work = {"code": "open('n', 'a').write('x')", "wait": 20}
    path = f"{V1}/sessions/{session}/execute"
    responses = [one.http.post(path, json=work, headers=key).json() for one in (b, a, b)]
    assert responses[0] == responses[1] == responses[2]
    assert b.http.get(f"{V1}/sessions/{session}/files/n").content == b"x"
    b.end(session)


def test_a_session_can_start_from_files_on_another_node(pair: Pair) -> None:
    _, b = pair.apis
    source = pair.on(0)
    b.put(source, "f", b"mine")
    # Their blobs are on their own disks, so it is made where the files are.
    made = b.create(started_from=source)
    assert made["runtime_node"] == pair[0].id
    assert b.http.get(f"{V1}/sessions/{made['id']}/files/f").content == b"mine"
    b.end(source)
    b.end(made["id"])


def test_a_client_cannot_mark_a_request_as_forwarded(pair: Pair) -> None:
    a, b = pair.apis
    session = pair.on(0)
    node = pair[1].id
    for value in ("", "1", node, f"{node} http", f"{node} http {'A' * 43}", "x" * 5000, "ä b c"):
        mark = {"Atoll-Hop": value.encode("latin-1")}
        for path in (f"/sessions/{session}/files", "/sessions", f"/sessions/{session}"):
            given = b.http.get(V1 + path, headers=mark)  # type: ignore[arg-type]
            problem(given, 403, "hop_refused")
        made = b.http.post(f"{V1}/sessions", json={}, headers=mark)  # type: ignore[arg-type]
        problem(made, 403, "hop_refused")
    assert refusal(b, "exec_1", headers={"Atoll-Hop": "1"}) == (403, "hop_refused")
    a.end(session)


def test_a_clone_is_created_on_the_node_of_its_files(pair: Pair) -> None:
    _, b = pair.apis
    source = pair.on(0)
    b.put(source, "f", b"mine")
    made = answer(b.http.post(f"{V1}/sessions/{source}/clone", json={}), 201)
    assert made["runtime_node"] == pair[0].id
    assert b.http.get(f"{V1}/sessions/{made['id']}/files/f").content == b"mine"
    problem(b.http.post(f"{V1}/sessions/nothing/clone", json={}), 404, "session_not_found")
    b.end(source)
    b.end(made["id"])


def test_any_node_accepts_a_state_request_for_a_session(pair: Pair) -> None:
    _, b = pair.apis
    session = pair.on(0)
    b.put(session, "f", b"kept")
    path = f"{V1}/sessions/{session}"
    assert answer(b.http.post(f"{path}/stop"))["status"] == "stopped"
    assert answer(b.http.patch(path, json={"labels": {"a": "b"}}))["labels"] == {"a": "b"}
    assert answer(b.http.post(f"{path}/start"))["status"] == "running"
    answer(b.http.post(f"{path}/stop"))
    assert b.run(session, "print(open('f').read())")["stdout"] == "kept\n"
    b.end(session)


def test_labels_that_match_no_node_are_refused(pair: Pair) -> None:
    _, b = pair.apis
    answered = b.http.post(f"{V1}/sessions", json={"node_labels": {"place": "nowhere"}})
    problem(answered, 503, "no_node")
    assert int(answered.headers["retry-after"]) >= 1


def test_the_next_node_is_used_when_one_is_full(
    bubblewrap: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("full")
    with Pair(directory, ATOLL_NODE__MAX_SESSIONS="1") as pair:
        a, b = pair.apis
        eventually(lambda: not any(one["session_count"] for one in pair.nodes_by_id(a).values()))
        eventually(lambda: not any(one["session_count"] for one in pair.nodes_by_id(b).values()))
        # Two concurrent requests to one node: its own count is newer than its last report.
        made = [a.create(), a.create()]
        assert {item["runtime_node"] for item in made} == {node.id for node in pair.nodes}
        answered = b.http.post(f"{V1}/sessions", json={})
        assert answered.status_code in (503, 507)
        assert answered.json()["code"] in ("no_node", "node_full")
        assert "retry-after" in answered.headers
        a.end(made[0]["id"])
        eventually(lambda: b.http.post(f"{V1}/sessions", json={}).status_code == 201)


def test_a_suspended_node_delays_requests_only_briefly(
    bubblewrap: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("still")
    with Pair(directory, ATOLL_NODE__PROBE_TIMEOUT="1") as pair:
        _, b = pair.apis
        session = pair.on(0)
        key = {"Idempotency-Key": uuid.uuid4().hex}
        body = {"node_labels": {"place": "0"}, "labels": {"made": "once"}}
        pair[0].pause()
        # It accepts connections without answering, until it counts as lost.
        problem(b.http.post(f"{V1}/sessions", json=body, headers=key), 503, "node_not_reached")
        problem(b.execute(session, code="1"), 503, "node_not_reached")
        problem(b.http.get(f"{V1}/sessions/{session}/files/f"), 503, "node_not_reached")
        pair[0].resume()

        def is_created() -> bool:
            return b.http.post(f"{V1}/sessions", json=body, headers=key).status_code == 201

        # The first request may have succeeded: a repetition returns the same response.
        eventually(is_created, LONG)
        listed = answer(b.http.get(f"{V1}/sessions?limit=500"))["items"]
        assert len([item for item in listed if item["labels"] == {"made": "once"}]) == 1


def test_a_killed_node_is_reported_as_unreachable(
    bubblewrap: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Pair(tmp_path_factory.mktemp("killed")) as pair:
        _, b = pair.apis
        session = pair.on(0)
        b.put(session, "f", b"kept")
        execution = b.submit(session, until("go"))
        b.await_status(execution, "running")
        shell = begin(b, pair.on(0), terminal=SHELL)
        with console(b, shell) as there:
            there.ready()
            pair[0].kill()
            assert there.closed()[0] == 1014
        asked = [
            b.http.get(f"{V1}/sessions/{session}/files/f"),
            b.execute(session, code="1"),
            b.http.put(f"{V1}/sessions/{session}/files/g", content=b"x" * MiB),
            b.http.post(f"{V1}/invocations", json={"session_id": session, "code": "1"}),
        ]
        for answered in asked:
            problem(answered, 503, "node_not_reached")
            assert "retry-after" in answered.headers
        # Recorded executions can still be read.
        assert b.get(session)["runtime_node"] == pair[0].id
        assert b.status(execution) in ("pending", "running")
        # New sessions are created on a node that answers.
        made = b.create()
        assert made["runtime_node"] == pair[1].id
        pair[0].start()
        eventually(lambda: b.http.get(f"{V1}/sessions/{session}/files/f").content == b"kept", LONG)
        b.put(session, "go")
        assert b.result(execution)["status"] == "success"
        assert b.end(session)["status"] == "terminated"


def test_a_session_with_files_in_the_blob_store_continues_on_another_node(
    bubblewrap: str, s3: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("archived")
    blobs = s3.environment(ATOLL_BLOB__URL=f"s3://atoll/{directory.name}")
    # Probes wait so long that they move no stopped sessions.
    with Pair(directory, blobs=blobs, ATOLL_NODE__UNHEALTHY_AFTER="1000") as pair:
        a, b = pair.apis
        source = pair.on(0)
        a.put(source, "f", b"of a")
        # It runs on another node: saved there first, then fetched.
        made = b.create(started_from=source, node_labels={"place": "1"})
        assert made["runtime_node"] == pair[1].id
        assert b.http.get(f"{V1}/sessions/{made['id']}/files/f").content == b"of a"
        b.end(made["id"])
        pinned, free = pair.on(0), pair.create_on(pair[0])
        for session in (pinned, free):
            b.put(session, "f", b"kept")
            assert answer(b.http.post(f"{V1}/sessions/{session}/archive"))["status"] == "archived"
        pair[0].kill()
        assert b.run(free, "print(open('f').read())")["stdout"] == "kept\n"
        assert pair.node_of(free) is pair[1]
        # Its node must have labels that no other has.
        problem(b.execute(pinned, code="1"), 503, "node_not_reached")
        assert pair.node_of(pinned) is pair[0]


def test_an_archived_session_of_a_full_node_starts_on_another(
    bubblewrap: str, s3: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("crowded")
    blobs = s3.environment(ATOLL_BLOB__URL=f"s3://atoll/{directory.name}")
    with Pair(directory, blobs=blobs, ATOLL_NODE__MAX_SESSIONS="1") as pair:
        _, b = pair.apis
        session = b.create()["id"]
        first = pair.node_of(session)
        b.put(session, "f", b"kept")
        answer(b.http.post(f"{V1}/sessions/{session}/archive"))
        number = pair.nodes.index(first)
        body = {"node_labels": {"place": str(number)}}
        # As soon as it has reported free capacity.
        eventually(lambda: b.http.post(f"{V1}/sessions", json=body).status_code == 201, LONG)
        # As soon as the other has reported free capacity: its last session has just ended.
        full = pair[number].api
        eventually(lambda: full.execute(session, code="1", wait=20).status_code == 200, LONG)
        for api in (full, pair[1 - number].api):
            output = api.run(session, "print(open('f').read())")
            assert output["stdout"] == "kept\n", output
        assert pair.node_of(session) is pair[1 - number]
