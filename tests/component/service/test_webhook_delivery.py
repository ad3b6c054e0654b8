"""One event sent: to the address that was checked, under the name, and judged by the answer."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from atoll.clock import SystemClock
from atoll.errors import Unauthenticated
from atoll.model.event import Event
from atoll.model.webhook import Webhook
from atoll.reconcile.webhooks import pause_after
from atoll.sdk.webhook_signature import verify_webhook
from atoll.service.auth.encryption import Encryption
from atoll.service.webhooks import delivery
from atoll.service.webhooks.delivery import WebhookSender, secret_context, signature
from atoll.settings import EventSettings
from tests.servers.receiver import Receiver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

pytestmark = pytest.mark.anyio

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SEALING = Encryption(["42" * 32])
EVENT = Event("session.stopped", "sess_1", datetime(2026, 1, 2, tzinfo=UTC), {"a": 1}, 7)
PRIVATE = EventSettings(webhook_private=True)


def webhook(url: str) -> Webhook:
    sealed = SEALING.seal(SECRET, secret_context("hook_1"))
    return Webhook("hook_1", EVENT.at, url, sealed, (), 0)


@asynccontextmanager
async def sending(settings: EventSettings = PRIVATE) -> AsyncIterator[Callable[[str], Any]]:
    line = await WebhookSender(SEALING, SystemClock(), settings).client()

    def send(url: str) -> Awaitable[Any]:
        return line.send(webhook(url), EVENT, "hook_1_7")

    try:
        yield send
    finally:
        await line.close()


def lead(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Responses of the name system, in order; returns the resolved names."""
    asked, left, really = [], list(answers), socket.getaddrinfo

    def look(host: str, port: int, *more: Any, **named: Any) -> list[Any]:
        if host[0].isdigit():
            return really(host, port, *more, **named)
        asked.append(host)
        found = left.pop(0) if len(left) > 1 else left[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    monkeypatch.setattr(socket, "getaddrinfo", look)
    return asked


def test_a_signature_matches_the_specification() -> None:
    """The example of Standard Webhooks."""
    body = b'{"test": 2432232314}'
    made = signature(SECRET, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def test_a_name_that_resolves_to_a_private_address_now_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Receiver() as receiver:
        lead(monkeypatch, ["127.0.0.1"])
        url = receiver.url.replace("127.0.0.1", "rebound.example")
        async with sending(EventSettings()) as send:
            answered = await send(url)

        assert "not public" in answered.error
        assert receiver.received == []


async def test_a_name_is_resolved_once_and_the_connection_uses_that_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second lookup for the connection could return another address."""
    with Receiver() as receiver:
        asked = lead(monkeypatch, ["127.0.0.1"], ["192.0.2.1"])
        url = receiver.url.replace("127.0.0.1", "named.example")
        async with sending() as send:
            answered = await send(url)

        assert answered.error is None
        assert asked == ["named.example"]
        received = receiver.received[0]
        assert received.headers["host"] == url.split("/")[2]
        assert received.signed_with(SECRET)
        assert verify_webhook(received.body, received.headers, SECRET).number == 7


async def test_the_next_address_is_tried_when_one_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Receiver() as receiver:
        lead(monkeypatch, ["127.9.9.9", "127.0.0.1"])
        async with sending() as send:
            answered = await send(receiver.url.replace("127.0.0.1", "two.example"))

    assert answered.status == 200


@pytest.mark.parametrize("name", ["right.example", "wrong.example"])
async def test_the_certificate_must_match_the_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, name: str
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("right.example").configure_cert(tls)
    served: list[str] = []
    tls.sni_callback = lambda _, sni, __: served.append(str(sni))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as server:
        port = server.sockets[0].getsockname()[1]
        lead(monkeypatch, ["127.0.0.1"])
        async with sending() as send:
            answered = await send(f"https://{name}:{port}/")

    assert served == [name]
    assert (answered.error is None) is (name == "right.example")


@pytest.mark.parametrize(
    ("said", "error"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", None, id="no end"),
        pytest.param(b"HTTP/1.1 301 Moved\r\nlocation: http://x/\r\n\r\n", "redirect", id="moved"),
        pytest.param(b"HTTP/1.1 410 Gone\r\n\r\n", "410", id="gone"),
        pytest.param(b"hello\r\n", "Error", id="no HTTP"),
        pytest.param(b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 300_000, "Error", id="long head"),
        pytest.param(b"", "Error", id="nothing"),
    ],
)
async def test_only_the_head_of_a_response_counts(said: bytes, error: str | None) -> None:
    """The one without an end is not waited for."""
    gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        if error is None:
            await reader.read()  # Until the other side has had enough.
        writer.close()
        gone.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with sending() as send:
            answered = await send(f"http://127.0.0.1:{port}/")
        await asyncio.wait_for(gone.wait(), 60)

    assert (answered.error is None) is (error is None)
    assert error is None or error in answered.error


async def test_a_webhook_that_does_not_answer_counts_as_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{delivery.__name__}.TIMEOUT", 0.05)
    with Receiver() as receiver:
        receiver.open.clear()
        async with sending() as send:
            answered = await send(receiver.url)

    assert answered.status is None
    assert "No response" in answered.error


async def test_a_secret_that_cannot_be_decrypted_counts_as_a_failure() -> None:
    line = await WebhookSender(Encryption(["43" * 32]), SystemClock(), PRIVATE).client()
    answered = await line.send(webhook("http://127.0.0.1:1/"), EVENT, "x")
    await line.close()

    assert answered.error is not None
    assert "secrets.key" in answered.error


def test_pauses_double_up_to_five_minutes() -> None:
    pauses = [pause_after(failures).total_seconds() for failures in (1, 2, 3, 4, 8, 9, 10, 10_000)]
    assert pauses == [1, 2, 4, 8, 128, 256, 300, 300]


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({}, id="none"),
        pytest.param({"webhook-id": "x", "webhook-timestamp": "٣"}, id="no number"),
        pytest.param({"webhook-id": "x", "webhook-timestamp": "1614265330"}, id="old"),
        pytest.param(
            {"webhook-id": "x", "webhook-timestamp": "9999999999", "webhook-signature": "v1,x"},
            id="of the future",
        ),
    ],
)
def test_an_invalid_or_old_signature_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthenticated):
        verify_webhook(b"{}", headers, SECRET)
