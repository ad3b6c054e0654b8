"""The REST API as a client calls it: paths and JSON, without code of Atoll."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests import drivers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx

V1 = "/api/v1"


class Api:
    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def create(self, **fields: Any) -> dict[str, Any]:
        """Create a session and return the response."""
        return answer(self.http.post(f"{V1}/sessions", json=fields), 201)

    def get(self, session_id: str) -> dict[str, Any]:
        return answer(self.http.get(f"{V1}/sessions/{session_id}"))

    def end(self, session_id: str) -> dict[str, Any]:
        return answer(self.http.delete(f"{V1}/sessions/{session_id}"))

    def execute(self, session_id: str, **fields: Any) -> httpx.Response:
        return self.http.post(f"{V1}/sessions/{session_id}/execute", json=fields)

    def run(self, session_id: str, code: str | None = None, **fields: Any) -> dict[str, Any]:
        """Run something to its end; its result."""
        if code is not None:
            fields["code"] = code
        return answer(self.execute(session_id, **{"wait": 20, **fields}), 200)

    def submit(self, session_id: str, code: str | None = None, **fields: Any) -> str:
        """Start something; its id."""
        if code is not None:
            fields["code"] = code
        return str(answer(self.execute(session_id, **fields), 202)["execution_id"])

    def result(self, execution_id: str, wait: float = 40) -> dict[str, Any]:
        return answer(self.http.get(f"{V1}/executions/{execution_id}/result?wait={wait}"))

    def execution(self, execution_id: str) -> dict[str, Any]:
        return answer(self.http.get(f"{V1}/executions/{execution_id}"))

    def status(self, execution_id: str) -> str:
        return str(answer(self.http.get(f"{V1}/executions/{execution_id}/status"))["status"])

    def await_status(self, execution_id: str, status: str) -> None:
        eventually(lambda: self.status(execution_id) == status)

    def put(self, session_id: str, path: str, content: bytes = b"") -> dict[str, Any]:
        return answer(
            self.http.put(f"{V1}/sessions/{session_id}/files/{path}", content=content), 201
        )

    def names(self, session_id: str, path: str = "") -> list[str]:
        listed = self.http.get(f"{V1}/sessions/{session_id}/files", params={"path": path})
        return [item["name"] for item in answer(listed)["items"]]

    def pool(self) -> dict[str, int]:
        """How many instances are ready, by template."""
        sizes: dict[str, int] = answer(self.http.get(f"{V1}/runtimes/{drivers.NODE}/metrics"))[
            "pool"
        ]
        return sizes

    def pools(self) -> dict[str, dict[str, Any]]:
        """State of the warm pools, by template."""
        items = answer(self.http.get(f"{V1}/pools"))["items"]
        return {item["template_id"]: item for item in items}

    def events(
        self, execution_id: str, after: str | None = None, *, heartbeats: bool = False
    ) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """
        Yield the id, name and content of each server-sent event. Heartbeats are left out unless
        requested, because their number depends on the speed of the machine.
        """
        headers = {} if after is None else {"Last-Event-ID": after}
        with self.http.stream(
            "GET", f"{V1}/executions/{execution_id}/events", headers=headers
        ) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            for event in read_events(response):
                if heartbeats or event[1] != "heartbeat":
                    yield event


@contextmanager
def session(api: Api, *volumes: dict[str, Any], **fields: Any) -> Iterator[str]:
    """One with these volumes, which ends with the block."""
    made = api.create(volumes=list(volumes), **fields)["id"]
    try:
        yield made
    finally:
        api.end(made)


def sh(api: Api, session_id: str, line: str) -> str:
    """What the line printed; it is to go well."""
    result = api.run(session_id, command=["sh", "-c", line])
    assert result["exit_code"] == 0, result
    return str(result["stdout"])


def read_events(response: httpx.Response) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Id (empty if missing), name and content of each event of a stream."""
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield fields.get("id", ""), fields["event"], json.loads(fields["data"])
            fields = {}


def answer(response: httpx.Response, status: int = 200) -> dict[str, Any]:
    assert response.status_code == status, f"{response.status_code}: {response.text}"
    content: dict[str, Any] = response.json()
    return content


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The answer as a problem document with all its members."""
    assert response.status_code == status, f"{response.status_code}: {response.text}"
    assert response.headers["content-type"] == "application/problem+json"
    content: dict[str, Any] = response.json()
    assert content["code"] == code, content
    assert content["status"] == status
    assert content["type"] == f"urn:atoll:problem:{code}"
    assert content["title"]
    assert content["detail"]
    return content


def eventually(condition: Callable[[], object], seconds: float = 45.0) -> None:
    """
    Poll a condition that has no event. Waits for less than the minute after which a sweep repairs
    missed events.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def until(name: str) -> str:
    """Python code that waits for a file to appear in the workspace."""
    return f"import os, time\nwhile not os.path.exists({name!r}): time.sleep(0.005)\n"
