"""A console as a client opens it: a WebSocket and the documented messages."""

from __future__ import annotations

import base64
import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import httpx
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.e2e.api import V1, Api, answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from websockets.sync.client import ClientConnection

PATIENCE = 45.0
PROMPT = "bash --norc --noprofile -i"


class Console:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.output = b""
        self.errors: list[dict[str, Any]] = []
        self.statuses: list[dict[str, Any]] = []
        self.position = 0
        self.exit: dict[str, Any] | None = None

    @property
    def typing(self) -> bool:
        return bool(self.statuses) and bool(self.statuses[-1]["typing"])

    def send(self, data: str | bytes) -> Self:
        self.socket.send(data.encode() if isinstance(data, str) else data)
        return self

    def send_message(self, **message: Any) -> Self:
        self.socket.send(json.dumps(message))
        return self

    def receive(self, timeout: float = PATIENCE) -> None:
        """Take one message."""
        message = self.socket.recv(timeout=timeout)
        if isinstance(message, bytes):
            self.output += message
            return
        content = json.loads(message)
        if content["type"] in ("stdout", "stderr"):
            self.output += base64.b64decode(content["base64"])
            self.position = content["position"]
        elif content["type"] == "status":
            self.statuses.append(content)
        elif content["type"] == "error":
            self.errors.append(content)
        else:
            assert content["type"] == "exit"
            self.exit = content

    def wait(self, met: Callable[[], object]) -> Self:
        deadline = time.monotonic() + PATIENCE
        while not met():
            try:
                self.receive(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                state = f"{self.output[-500:]!r} {self.errors} {self.statuses}"
                raise AssertionError(f"it did not come: {state}") from None
        return self

    def until(self, text: str) -> Self:
        return self.wait(lambda: text.encode() in self.output)

    def ready(self) -> Self:
        """Until it runs and this one may type."""
        return self.wait(lambda: self.typing and self.statuses[-1]["status"] == "running")

    def refused(self, code: str) -> Self:
        """Until something was refused with this code."""
        return self.wait(lambda: any(error["code"] == code for error in self.errors))

    def ended(self) -> dict[str, Any]:
        """How the execution ended; the connection is closed after that."""
        self.wait(lambda: self.exit is not None)
        assert self.closed() == (1000, "")
        assert self.exit is not None
        return self.exit

    def closed(self) -> tuple[int | None, str | None]:
        """What the connection is closed with, when it is."""
        deadline = time.monotonic() + 60
        while True:
            try:
                self.receive(max(0.0, deadline - time.monotonic()))
            except ConnectionClosed:
                return self.socket.close_code, self.socket.close_reason


@contextmanager
def console(
    api: Api,
    execution_id: str,
    *,
    key: str | None = None,
    headers: dict[str, str] | None = None,
    **options: Any,
) -> Iterator[Console]:
    """Opened with the key of the client, unless another is given."""
    query = httpx.QueryParams({k: str(v) for k, v in options.pop("query", {}).items()})
    given = {**(headers or {})}
    if key is None:
        given["Authorization"] = api.http.headers["Authorization"]
    elif key:
        given["Authorization"] = f"Bearer {key}"
    base = str(api.http.base_url).rstrip("/").replace("http", "ws", 1)
    with connect(
        f"{base}{V1}/executions/{execution_id}/console?{query}",
        additional_headers=given,
        proxy=None,
        compression=None,
        **options,
    ) as socket:
        yield Console(socket)


def refusal(api: Api, execution_id: str, **options: Any) -> tuple[int, str]:
    """The status and code with which a console is refused."""
    try:
        with console(api, execution_id, **options):
            raise AssertionError("it was opened")
    except InvalidStatus as error:
        answered = error.response
        assert answered.headers["content-type"] == "application/problem+json"
        content = json.loads(bytes(answered.body or b""))
        assert content["status"] == answered.status_code
        return answered.status_code, content["code"]


def begin(api: Api, session_id: str, **fields: Any) -> str:
    """Start something to attach to, a shell if nothing is named; its id."""
    if "code" not in fields and "command" not in fields:
        fields["command"] = PROMPT.split()
    body = {"session_id": session_id, "mode": "console", **fields}
    return str(answer(api.http.post(f"{V1}/invocations", json=body), 202)["execution_id"])
