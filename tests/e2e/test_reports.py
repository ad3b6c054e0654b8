"""Executors that report to /internal of a real server, besides their link."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem, until
from tests.executors import RunOutput, executor, job
from tests.harness import Server
from tests.runs import run_over

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.anyio, pytest.mark.quick]

NOWHERE = "http://192.0.2.1:9"
"""An unused address for the instances of the server, which have no network."""
RESULT: dict[str, Any] = {
    "exit_code": 0, "signal": None, "reason": None, "duration": 0.25,
    "usage": {"cpu": 0.1, "peak": 1024, "read": 0, "written": 0},
    "sizes": {"1": 9, "2": 0, "3": 0}, "artifacts": [], "artifacts_cut": False,
}  # fmt: skip
REPORTER = """
import os
seen = []
for pid in filter(str.isdigit, os.listdir('/proc')):
    if open('/proc/%s/comm' % pid).read() == 'reporter\\n':
        for name in ('mem', 'environ', 'maps', 'fd/8', 'auxv'):
            try:
                os.close(os.open('/proc/%s/%s' % (pid, name), os.O_RDONLY))
                seen.append('opened ' + name)
            except PermissionError:
                seen.append('refused')
print(sorted(set(seen)), b'atollinst' in open('/proc/1/cmdline', 'rb').read())
"""


@pytest.fixture(scope="module")
def reporting(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("reporting")
    with Server(home, ATOLL_POOL__SIZE="1", ATOLL_LINK__CALLBACK_URL=NOWHERE) as server:
        yield server


@pytest.fixture(scope="module")
def api(reporting: Server) -> Iterator[Api]:
    with reporting.client() as http:
        yield Api(http)


class Waiting:
    """An execution that waits for a file in its own session."""

    def __init__(self, server: Server, api: Api, **fields: Any) -> None:
        session = api.create(**fields)
        self.api = api
        self.session: str = session["id"]
        self.instance: str = session["container_id"]
        directory = server.data_dir / "node" / "instances" / self.instance / "callback.json"
        assert directory.stat().st_mode & 0o777 == 0o600
        self.token: str = json.loads(directory.read_text())["token"]
        self.id = api.submit(self.session, until("go") + "print('by the link')")
        api.await_status(self.id, "running")

    def record(self) -> dict[str, Any]:
        found = answer(self.api.http.get(f"{V1}/sessions/{self.session}/executions"))["items"]
        (record,) = [item for item in found if item["id"] == self.id]
        return dict(record)

    def finish(self) -> dict[str, Any]:
        self.api.put(self.session, "go")
        return self.api.result(self.id)


@pytest.fixture
def waiting(reporting: Server, api: Api) -> Iterator[Waiting]:
    made = Waiting(reporting, api)
    yield made
    api.end(made.session)


@pytest.fixture
def other(reporting: Server, api: Api) -> Iterator[Waiting]:
    made = Waiting(reporting, api)
    yield made
    api.end(made.session)


def post(server: Server, path: str, token: str | None, body: Any = None) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.post(f"{server.url}/internal/{path}", headers=headers, json=body or {}, timeout=30)


def report(text: bytes = b"reported\n", **changes: Any) -> dict[str, Any]:
    log = [[1, 1, base64.b64encode(text).decode()], [2, 3, base64.b64encode(b"V[5]").decode()]]
    return {"result": {**RESULT, **changes}, "log": log}


async def test_a_result_arrives_while_the_link_is_cut(
    bubblewrap: str, tmp_path: Path, reporting: Server, waiting: Waiting
) -> None:
    callback = {
        "instance": waiting.instance, "url": reporting.url, "token": waiting.token,
        "loopback": True,
    }  # fmt: skip
    code = "print('x' * 100_000)\ndef handler(event): return {'reported': event}"
    with executor(bubblewrap, tmp_path, callback=callback) as program:
        link = await program.connect_released()
        await run_over(link, job(waiting.id, code, event=7), RunOutput())
        link.close()
        eventually(lambda: waiting.record()["status"] == "completed")

    result = waiting.finish()
    assert result["status"] == "success"
    assert result["stdout"] == "x" * 100_000 + "\n"
    assert result["return_value"] == {"reported": 7}


def test_the_files_are_stored_before_a_reported_result(reporting: Server, api: Api) -> None:
    waiting = Waiting(reporting, api, durability="execution")
    api.put(waiting.session, "made.txt")
    path = f"executions/{waiting.id}/result"
    assert answer(post(reporting, path, waiting.token, report())) == {"stored": True}
    assert answer(api.http.get(f"{V1}/sessions/{waiting.session}/checkpoint"))["files"] == 1
    api.end(waiting.session)


def test_a_result_is_stored_once_and_all_waiting_requests_get_it(
    reporting: Server, waiting: Waiting
) -> None:
    path = f"executions/{waiting.id}/result"
    assert answer(post(reporting, path, waiting.token, report())) == {"stored": True}
    stored = waiting.record()
    again = report(b"another\n", exit_code=1)
    assert answer(post(reporting, path, waiting.token, again)) == {"stored": False}
    assert waiting.record() == stored

    result = waiting.finish()
    assert (result["stdout"], result["return_value"]) == ("reported\n", [5])
    assert answer(post(reporting, path, waiting.token, again)) == {"stored": False}
    assert waiting.record()["exit_code"] == 0


def test_a_result_of_the_maximum_size_is_accepted(reporting: Server, waiting: Waiting) -> None:
    large_report = report(b"x" * (1 << 20))
    shown = b'{"type":"display","data":{"text/plain":"%s"}}\n' % (b"x" * (8 << 20))
    large_report["log"] += [[3, 2, base64.b64encode(b"y" * (1 << 20)).decode()]]
    for start in range(0, len(shown), 65536):
        piece = base64.b64encode(shown[start : start + 65536]).decode()
        large_report["log"].append([4 + start // 65536, 5, piece])
    path = f"executions/{waiting.id}/result"
    assert answer(post(reporting, path, waiting.token, large_report)) == {"stored": True}
    assert len(waiting.finish()["results"]) == 1


def test_status_and_heartbeat_change_nothing(reporting: Server, waiting: Waiting) -> None:
    before = waiting.record()
    execution = f"executions/{waiting.id}"
    running = {"status": "running"}
    assert answer(post(reporting, f"instances/{waiting.instance}/ready", waiting.token)) == {}
    assert answer(post(reporting, f"{execution}/status", waiting.token, running)) == {}
    assert answer(post(reporting, f"{execution}/heartbeat", waiting.token)) == {}
    assert waiting.record() == before
    assert waiting.finish()["stdout"] == "by the link\n"


def test_only_the_instance_itself_can_report(
    reporting: Server, waiting: Waiting, other: Waiting
) -> None:
    before = waiting.record()
    end = waiting.token[:-1] + ("0" if waiting.token[-1] != "0" else "1")
    name, instance, expiry, signature = waiting.token.split(".")
    forged = [
        end,
        f"{name}.{instance}.{int(expiry) + 1}.{signature}",
        f"{name}.{other.instance}.{expiry}.{signature}",
        f"{name}.{instance}.+{expiry}.{signature}",
        reporting.key,
        "x" * 10_000,
    ]
    for what in ("result", "status", "heartbeat"):
        path = f"executions/{waiting.id}/{what}"
        body = {**report(), "status": "running"}
        problem(post(reporting, path, None, body), 401, "token_missing")
        for token in forged:
            problem(post(reporting, path, token, body), 401, "token_unknown")
        problem(post(reporting, path, other.token, body), 404, "execution_not_found")
        missing = f"executions/exec_nobody/{what}"
        problem(post(reporting, missing, other.token, body), 404, "execution_not_found")
    ready = f"instances/{waiting.instance}/ready"
    problem(post(reporting, ready, other.token), 403, "token_of_another")
    assert waiting.record() == before


def test_the_token_of_an_instance_is_not_an_api_key(reporting: Server, waiting: Waiting) -> None:
    headers = {"Authorization": f"Bearer {waiting.token}"}
    url = f"{reporting.url}{V1}/sessions"
    problem(httpx.get(url, headers=headers, timeout=60), 401, "key_unknown")


def test_an_invalid_report_is_refused(reporting: Server, waiting: Waiting) -> None:
    before = waiting.record()
    path = f"executions/{waiting.id}/result"
    bad: list[Any] = [
        {}, [], "text", {"result": 1}, {"result": {}, "log": [[1, 1, "not base64!"]]},
        {"result": {}, "log": [[-1, 1, ""]]}, {"result": {}, "log": [[1, 1]]},
        report(duration="long"), report(duration=1e300), report(duration=-1), report(sizes=[1]),
        report(artifacts=[{"path": "x"}]),
        report(artifacts=[{"path": "x", "size": 1, "modified": 10**40}]),
    ]  # fmt: skip
    for body in bad:
        problem(post(reporting, path, waiting.token, body), 422, "invalid_request")
    headers = {"Authorization": f"Bearer {waiting.token}"}
    given: dict[str, Any] = {"headers": headers, "timeout": 60}
    url = f"{reporting.url}/internal/{path}"
    problem(httpx.post(url, content=b"{nonsense", **given), 400, "bad_json")
    large = httpx.post(url, content=bytes(40 * 1024 * 1024), **given)
    problem(large, 413, "body_too_large")
    problem(httpx.post(f"{reporting.url}/internal/else", **given), 404, "not_found")
    problem(httpx.get(url, **given), 405, "method_not_allowed")
    assert waiting.record() == before


def test_user_code_sees_nothing_of_the_reporting_process(reporting: Server, api: Api) -> None:
    session = api.create()["id"]
    eventually(
        lambda: api.run(session, REPORTER)["stdout"] == "['refused'] False\n",
    )
    assert api.run(session, "print(1)")["stdout"] == "1\n"
    api.end(session)
