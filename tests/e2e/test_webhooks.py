"""Webhooks: permitted addresses, and delivery despite failures."""

from __future__ import annotations

import json
import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest

from atoll import Atoll, Unauthenticated, verify_webhook
from atoll.service.webhooks import delivery
from tests.e2e.api import V1, Api, answer, eventually, problem
from tests.harness import Server
from tests.servers.receiver import Receiver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.quick

PATIENT = {f"{delivery.__name__}.TIMEOUT": 60.0}
PRIVATE = {
    "ATOLL_EVENT__WEBHOOK_PRIVATE": "true",
    "ATOLL_POOL__SIZE": "1",
}


@pytest.fixture(scope="module")
def trusting(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose webhooks may be on this machine."""
    with Server(tmp_path_factory.mktemp("trusting"), **PRIVATE).with_constants(PATIENT) as running:
        yield running


@pytest.fixture
def hooked(trusting: Server) -> Iterator[Api]:
    """Its API; webhooks that a test leaves go with the test."""
    with trusting.client() as http:
        api = Api(http)
        yield api
        remove(api, *answer(http.get(f"{V1}/webhooks"))["items"])


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


@pytest.fixture
def hooked_session(hooked: Api) -> Iterator[str]:
    session_id = str(hooked.create()["id"])
    yield session_id
    hooked.end(session_id)


def register(api: Api, receiver: Receiver, **fields: Any) -> dict[str, Any]:
    body = {"url": receiver.url, "types": ["execution.*"], **fields}
    return answer(api.http.post(f"{V1}/webhooks", json=body), 201)


def look(api: Api, webhook: dict[str, Any]) -> dict[str, Any]:
    return answer(api.http.get(f"{V1}/webhooks/{webhook['id']}"))


def remove(api: Api, *webhooks: dict[str, Any]) -> None:
    for webhook in webhooks:
        assert api.http.delete(f"{V1}/webhooks/{webhook['id']}").status_code == 204


def test_events_arrive_in_order_and_signed(
    hooked: Api, hooked_session: str, receiver: Receiver
) -> None:
    made = register(hooked, receiver)
    first = hooked.run(hooked_session, "print('secret words')")["execution_id"]
    second = hooked.run(hooked_session, "1")["execution_id"]

    received = receiver.wait_for(4)

    assert [(one.event["type"], one.event["subject"]) for one in received] == [
        ("execution.submitted", first),
        ("execution.completed", first),
        ("execution.submitted", second),
        ("execution.completed", second),
    ]
    numbers = [one.event["number"] for one in received]
    assert numbers == sorted(set(numbers))
    assert [one.headers["webhook-id"] for one in received] == [
        f"{made['id']}_{number}" for number in numbers
    ]
    assert all(one.signed_with(made["secret"]) for one in received)
    assert not received[0].signed_with("whsec_" + "A" * 32)
    assert all(b"secret words" not in one.body for one in received)
    assert all(one.headers["host"] == receiver.url.split("/")[2] for one in received)
    event = verify_webhook(received[0].body, received[0].headers, made["secret"])
    assert event.subject == first
    with pytest.raises(Unauthenticated):
        verify_webhook(received[0].body + b" ", received[0].headers, made["secret"])
    eventually(lambda: look(hooked, made)["delivered"] >= numbers[-1])
    assert look(hooked, made)["deliveries"]["last_status"] == 200
    assert "secret" not in look(hooked, made)
    assert made["secret"] not in answer(hooked.http.get(f"{V1}/webhooks")).__repr__()


def test_a_webhook_gets_only_events_between_its_creation_and_deletion(
    hooked: Api, hooked_session: str, receiver: Receiver
) -> None:
    hooked.run(hooked_session, "1")
    made = register(hooked, receiver, types=["execution.completed"])
    wanted = hooked.run(hooked_session, "1")["execution_id"]
    assert receiver.wait_for(1)[0].event["subject"] == wanted
    remove(hooked, made)
    register(hooked, receiver, types=["execution.submitted"])
    last = hooked.run(hooked_session, "1")["execution_id"]

    received = receiver.wait_for(2)

    assert received[1].event == {**received[1].event, "type": "execution.submitted"}
    assert received[1].event["subject"] == last


@pytest.mark.slow
def test_a_refused_event_is_retried_before_later_events(
    hooked: Api, hooked_session: str, receiver: Receiver
) -> None:
    receiver.statuses = [500, 302, 204]
    receiver.location = f"{receiver.url}/elsewhere"
    made = register(hooked, receiver)
    hooked.run(hooked_session, "1")

    received = receiver.wait_for(4)

    assert [one.event["type"] for one in received] == [
        "execution.submitted",
        "execution.submitted",
        "execution.submitted",
        "execution.completed",
    ]
    assert len({one.headers["webhook-id"] for one in received[:3]}) == 1
    assert {one.path for one in received} == {"/hook"}
    assert all(one.signed_with(made["secret"]) for one in received)
    eventually(lambda: look(hooked, made)["deliveries"]["failures"] == 0)
    deliveries = look(hooked, made)["deliveries"]
    assert (deliveries["gave_up"], deliveries["last_error"], deliveries["retry_at"]) == (
        0,
        None,
        None,
    )


@pytest.mark.slow
def test_a_failed_delivery_is_retried_after_a_restart(
    bubblewrap: str, tmp_path: Path, receiver: Receiver
) -> None:
    receiver.statuses = [503] * 4
    with Server(tmp_path, **PRIVATE) as server:
        with server.client() as http:
            api = Api(http)
            session_id = api.create()["id"]
            made = register(api, receiver)
            api.run(session_id, "1")
            receiver.wait_for(1)
            eventually(lambda: look(api, made)["deliveries"]["failures"] >= 1)
            deliveries = look(api, made)["deliveries"]
            assert deliveries["last_status"] == 503
            assert deliveries["retry_at"] is not None
        server.stop(signal.SIGKILL)
        receiver.statuses = []
        server.start()
        eventually(lambda: receiver.received[-1].event["type"] == "execution.completed", 30)
        *tries, _ = receiver.received
        assert len(tries) >= 2
        assert {one.event["type"] for one in tries} == {"execution.submitted"}
        assert len({one.headers["webhook-id"] for one in tries}) == 1
        with server.client() as http:
            Api(http).end(session_id)


def test_an_event_refused_too_often_is_dropped_and_counted(
    bubblewrap: str, tmp_path: Path, receiver: Receiver
) -> None:
    receiver.statuses = [500, 500]
    with (
        Server(tmp_path, **PRIVATE, ATOLL_EVENT__WEBHOOK_RETRIES="1") as server,
        server.client() as http,
    ):
        api = Api(http)
        session_id = api.create()["id"]
        made = register(api, receiver)
        api.run(session_id, "1")

        received = receiver.wait_for(3)

        assert [one.event["type"] for one in received] == [
            "execution.submitted",
            "execution.submitted",
            "execution.completed",
        ]
        eventually(lambda: look(api, made)["delivered"] >= received[2].event["number"])
        assert look(api, made)["deliveries"]["gave_up"] == 1
        api.end(session_id)


def test_a_slow_receiver_delays_no_other(hooked: Api, hooked_session: str) -> None:
    with Receiver() as slow, Receiver() as quick:
        slow.open.clear()
        register(hooked, slow)
        register(hooked, quick)
        for _ in range(3):
            hooked.run(hooked_session, "1")

        quick.wait_for(6)
        slow.wait_for(1)

        assert len(slow.received) == 1
        slow.open.set()
        slow.wait_for(6)
        assert [one.event for one in slow.received] == [one.event for one in quick.received]


def test_a_re_enabled_webhook_receives_the_missed_events(
    hooked: Api, hooked_session: str, receiver: Receiver
) -> None:
    made = register(hooked, receiver, enabled=False)
    missed = hooked.run(hooked_session, "1")["execution_id"]
    path = f"{V1}/webhooks/{made['id']}"
    changed = answer(
        hooked.http.patch(path, json={"enabled": True, "types": ["execution.completed"]})
    )
    assert changed["types"] == ["execution.completed"]

    assert receiver.wait_for(1)[0].event["subject"] == missed


def test_a_new_address_is_tried_at_once(
    hooked: Api, hooked_session: str, receiver: Receiver
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    made = register(hooked, receiver, url=f"http://127.0.0.1:{port}/")
    hooked.run(hooked_session, "1")
    eventually(lambda: look(hooked, made)["deliveries"]["failures"] >= 2)
    assert look(hooked, made)["deliveries"]["last_status"] is None
    answer(hooked.http.patch(f"{V1}/webhooks/{made['id']}", json={"url": receiver.url}))

    receiver.wait_for(2)


def test_a_test_delivery_returns_its_outcome(
    trusting: Server, hooked: Api, receiver: Receiver
) -> None:
    with Atoll(trusting.url, api_key=trusting.key) as atoll:
        made = atoll.webhooks.create(receiver.url, types=["node.*"])
        assert made.secret is not None
        assert atoll.webhooks.test(made.id).delivered
        received = receiver.wait_for(1)[0]
        assert received.event["type"] == "webhook.test"
        assert received.event["number"] is None
        assert verify_webhook(received.body, received.headers, made.secret).subject == made.id
        receiver.statuses = [404]
        tried = atoll.webhooks.test(made.id)
        assert (tried.delivered, tried.status) == (False, 404)
        assert [one.id for one in atoll.webhooks.list()] == [made.id]
        assert atoll.webhooks.change(made.id, enabled=False).enabled is False
        atoll.webhooks.delete(made.id)
        assert list(atoll.webhooks.list()) == []
        problem(hooked.http.get(f"{V1}/webhooks/{made.id}"), 404, "webhook_not_found")


def test_the_commands_manage_webhooks(trusting: Server, receiver: Receiver) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        done = trusting.atoll("webhook", *arguments)
        assert done.returncode == code, done.stderr
        return done.stdout

    webhook_id, secret = run("create", receiver.url, "--types", "session.*").split()
    assert secret.startswith("whsec_")
    assert "answered 200" in run("test", webhook_id)
    assert receiver.wait_for(1)[0].signed_with(secret)
    receiver.statuses = [500]
    assert "Response status 500" in run("test", webhook_id, code=1)
    assert webhook_id in run("list")
    assert json.loads(run("show", webhook_id, "--json"))["types"] == ["session.*"]
    assert run("change", webhook_id, "--disable").strip() == webhook_id
    assert json.loads(run("rm", webhook_id, "--json")) == {"removed": [webhook_id]}


REFUSED = [
    pytest.param("ftp://example.com/", "webhook_bad_url", id="scheme"),
    pytest.param("https://", "webhook_bad_url", id="no host"),
    pytest.param("https://user:word@example.com/", "webhook_bad_url", id="password"),
    pytest.param("https://example.com/#x", "webhook_bad_url", id="fragment"),
    pytest.param("https://example.com/\r\nx: y", "webhook_bad_url", id="line"),
    pytest.param("https://example.com:99999/", "webhook_bad_url", id="port"),
    pytest.param("https://example.com/" + "x" * 3000, "webhook_bad_url", id="long"),
    pytest.param("http://127.0.0.1/", "webhook_private_address", id="loopback"),
    pytest.param("http://localhost:8000/", "webhook_private_address", id="localhost"),
    pytest.param("http://10.1.2.3/", "webhook_private_address", id="ten"),
    pytest.param("http://169.254.169.254/latest/", "webhook_private_address", id="metadata"),
    pytest.param("http://[::1]/", "webhook_private_address", id="loopback 6"),
    pytest.param("http://[::ffff:10.0.0.1]/", "webhook_private_address", id="mapped"),
    pytest.param("http://[64:ff9b::7f00:1]/", "webhook_private_address", id="nat64"),
    pytest.param("http://[fd00::1]/", "webhook_private_address", id="unique local"),
    pytest.param("http://0.0.0.0/", "webhook_private_address", id="unspecified"),
    pytest.param("http://2130706433/", "webhook_private_address", id="as a number"),
    pytest.param("http://0x7f.1/", "webhook_private_address", id="as hexadecimal"),
    pytest.param("http://no-such-host.invalid/", "webhook_unknown_host", id="no such host"),
]


@pytest.mark.parametrize(("url", "code"), REFUSED)
def test_an_address_that_is_not_public_is_refused(api: Api, url: str, code: str) -> None:
    problem(api.http.post(f"{V1}/webhooks", json={"url": url}), 422, code)


@pytest.mark.slow
def test_a_private_address_is_refused_at_delivery_as_well(
    bubblewrap: str, tmp_path: Path, receiver: Receiver
) -> None:
    """What a name leads to may have changed since; here it is the setting that has."""
    with Server(tmp_path, **PRIVATE) as server:
        with server.client() as http:
            made = register(Api(http), receiver)
        server.stop()
        server._env = {"ATOLL_POOL__SIZE": "1"}
        server.start()
        with server.client() as http:
            api = Api(http)
            session_id = api.create()["id"]
            api.run(session_id, "1")
            eventually(lambda: look(api, made)["deliveries"]["failures"] >= 1)
            assert "not public" in look(api, made)["deliveries"]["last_error"]
            tried = answer(http.post(f"{V1}/webhooks/{made['id']}/test"))
            assert tried["delivered"] is False
            api.end(session_id)
    assert receiver.received == []


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"secret": "whsec_"}, id="empty secret"),
        pytest.param({"secret": "whsec_c2hvcnQ="}, id="short secret"),
        pytest.param({"secret": "A" * 64}, id="secret of no kind"),
        pytest.param({"secret": "whsec_" + "!" * 64}, id="no base64"),
        pytest.param({"types": ["session"]}, id="no type"),
        pytest.param({"types": ["a.b"] * 40}, id="many types"),
        pytest.param({"surprise": 1}, id="another field"),
    ],
)
def test_an_invalid_webhook_is_refused(
    hooked: Api, receiver: Receiver, fields: dict[str, Any]
) -> None:
    body = {"url": receiver.url, **fields}
    problem(hooked.http.post(f"{V1}/webhooks", json=body), 422, "invalid_request")


def test_a_secret_of_the_request_is_used_and_not_returned(
    hooked: Api, hooked_session: str, receiver: Receiver
) -> None:
    secret = "whsec_" + "Zm9v" * 12
    headers = {"idempotency-key": "once"}
    body = {"url": receiver.url, "types": ["execution.*"], "secret": secret}
    made = answer(hooked.http.post(f"{V1}/webhooks", json=body, headers=headers), 201)
    again = answer(hooked.http.post(f"{V1}/webhooks", json=body, headers=headers), 201)
    assert made == again
    assert made["secret"] is None
    hooked.run(hooked_session, "1")

    assert receiver.wait_for(1)[0].signed_with(secret)
    del body["secret"]
    headers = {"idempotency-key": "twice"}
    refused = hooked.http.post(f"{V1}/webhooks", json=body, headers=headers)
    problem(refused, 422, "invalid_request")
