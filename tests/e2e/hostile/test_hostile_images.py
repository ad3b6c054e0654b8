"""An image whose interpreter is no interpreter: PID 1 sends the control plane what it likes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings

from tests.e2e.hostile.host import Box, MiB, eventually, living, resident
from tests.fuzz.hostile import Said, scripts
from tests.fuzz.servers import hostile_server, play

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.hostile.conftest import Target

HEADER = "struct.pack('!IB', number, 1)"
ATTACKS = {
    "400 MB of output": (
        f"for number in range(1, 6400): link.frame(stream, OUTPUT, {HEADER} + b'x' * 65536)"
    ),
    "a 33 MB event": "link.say(stream, EVENT, {'event': ['x'] * 8_000_000})",
    "300,000 artifacts": (
        "one = {'path': 'a', 'size': 1, 'modified': 1, 'sha256': None}\n"
        "link.say(stream, END, {**RESULT, 'artifacts': [one] * 300_000})"
    ),
    "a duration that is no number": "link.say(stream, END, {**RESULT, 'duration': 'nan'})",
}
MORE = {
    "a duration without end": "link.say(stream, END, {**RESULT, 'duration': float('inf')})",
    "events without end": "while True: link.say(stream, EVENT, {'event': 'heartbeat'})",
    "a megabyte of empty lists": "link.frame(stream, END, b'{\"a\":[' + b'[],' * 300_000 + b'1]}')",
    "wrong types": "link.say(stream, END, {name: [] for name in RESULT})",
    "an unknown kind": "link.frame(stream, 99, b'')",
    "an unknown stream": "link.say(stream + 7, END, RESULT)",
    "a frame that never ends": "link.send(struct.pack('!IIB', 2**31, stream, END) + b'x' * 10**6)",
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, bubblewrap: str) -> Iterator[Target]:
    with hostile_server(tmp_path_factory.mktemp("images"), start_timeout=10) as target:
        yield target


@pytest.fixture
def box(hostile: Target) -> Iterator[Box]:
    box = hostile.box(template_id="python3")
    yield box
    hostile.client.delete(box.url)


def attacked(hostile: Target, box: Box, code: str) -> None:
    before, instance = resident(hostile.pid), box.pid_1
    result = box.run(code)
    assert (result["status"], result["cause"]) == ("failed", "protocol"), result
    assert result["error"]["code"] == "protocol"
    assert result["exit_code"] is None
    shown = hostile.client.get(f"/api/v1/executions/{result['execution_id']}").json()
    assert [attempt["cause"] for attempt in shown["attempts"]] == ["protocol"]
    assert len(result["stdout"]) <= MiB
    assert result["stdout_bytes"] <= MiB
    assert resident(hostile.pid) - before < 64 * MiB
    eventually(lambda: instance not in living(), "the end of the instance")
    # The next instance is another one, whose lies are bounded likewise.
    assert box.run("link.say(stream, END, RESULT)")["status"] == "success"


@pytest.mark.quick
def test_an_execution_of_a_hostile_image_fails_with_cause_protocol(
    hostile: Target, box: Box
) -> None:
    for code in ATTACKS.values():
        attacked(hostile, box, code)
    assert re.search(r"nan|inf", hostile.client.get("/metrics").text, re.IGNORECASE) is None


@pytest.mark.parametrize("code", MORE.values(), ids=MORE.keys())
def test_whatever_a_hostile_image_does(hostile: Target, box: Box, code: str) -> None:
    attacked(hostile, box, code)


def test_lies_about_files_are_errors_of_the_executor(hostile: Target, box: Box) -> None:
    for path in ("files?path=lie", "contexts", "processes"):
        assert box.run("link.say(stream, END, RESULT)")["status"] == "success"
        answer = hostile.client.get(f"{box.url}/{path}")
        assert answer.status_code == 502, (path, answer.text)
        assert answer.json()["code"] == "protocol_violation"


def test_an_image_that_never_says_hello_has_no_sessions(hostile: Target) -> None:
    answer = hostile.client.post("/api/v1/sessions", json={"template_id": "mute"})
    assert 500 <= answer.status_code < 600, answer.text
    assert "did not answer" in answer.json()["detail"]


@settings(max_examples=8)
@given(scripts("run"))
def test_whatever_it_sends_an_execution_ends(hostile: Target, script: list[Said]) -> None:
    box = hostile.box(template_id="python3")
    before = resident(hostile.pid)
    play(box, script)
    assert resident(hostile.pid) - before < 64 * MiB
    assert hostile.client.delete(box.url).is_success
