"""
An image with a fake interpreter: PID 1 sends the control plane arbitrary bytes.

Messages are handled equally with every driver, so they are tested on one. The transport differs,
and the way to start and end an instance: a socket (`docker`), a relay in the container (`remote`),
and a relay under a separate kernel (`gvisor`).
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings

from tests import drivers
from tests.e2e.hostile.host import Box, MiB, eventually, resident
from tests.fuzz.hostile import Said, scripts
from tests.fuzz.servers import hostile_server, play
from tests.host_processes import living

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.hostile.conftest import Target
    from tests.servers.docker import Dockerd

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


ERRORS = "standard error"
BYTES = {
    "bytes of output": ATTACKS["400 MB of output"],
    "announces": MORE["a frame that never ends"],
    ERRORS: "while True: link.error(b'x' * 65536)",
}
"""Byte sequences for each transport, by the expected error; the last concerns relays only."""
ENGINES = ("docker", "remote", "gvisor")
RELAYED = ("remote", "gvisor")
START_TIMEOUT = 10


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, bubblewrap: str) -> Iterator[Target]:
    with hostile_server(tmp_path_factory.mktemp("images"), START_TIMEOUT) as target:
        yield target


@pytest.fixture(scope="module")
def engines(
    dockerd: Dockerd, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Target]]:
    """Servers with an engine by kind, each started by the first test that needs it."""
    over_tls = {
        f"ATOLL_DOCKER__{name.upper()}": str(value) for name, value in dockerd.over_tls.items()
    }
    kinds = {"docker": {}, "remote": over_tls, "gvisor": {"ATOLL_DOCKER__RUNTIME": "runsc"}}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for name, value in drivers.settings(dockerd.url).items():
            patch.setenv(name, value)

        @cache
        def started(kind: str) -> Target:
            home = tmp_path_factory.mktemp(kind)
            return stack.enter_context(hostile_server(home, START_TIMEOUT, **kinds[kind]))

        yield started


@pytest.fixture(params=ENGINES)
def contained(
    request: pytest.FixtureRequest, engines: Callable[[str], Target]
) -> tuple[str, Target]:
    if request.param == "gvisor":
        request.getfixturevalue("runsc")
    return request.param, engines(request.param)


@pytest.fixture
def box(hostile: Target) -> Iterator[Box]:
    box = hostile.box(template_id="python3")
    yield box
    hostile.client.delete(box.url)


def attacked(hostile: Target, box: Box, code: str, why: str = "") -> None:
    """`why` is of the message: a run that only lasts too long has the same cause."""
    before, instance = resident(hostile.pid), box.pid_1
    result = box.run(code)
    assert (result["status"], result["cause"]) == ("failed", "protocol"), result
    assert result["error"]["code"] == "protocol"
    assert why in result["error"]["message"]
    assert result["exit_code"] is None
    shown = hostile.client.get(f"/api/v1/executions/{result['execution_id']}").json()
    assert [attempt["cause"] for attempt in shown["attempts"]] == ["protocol"]
    assert len(result["stdout"]) <= MiB
    assert result["stdout_bytes"] <= MiB
    assert resident(hostile.pid) - before < 64 * MiB
    eventually(lambda: instance not in living(), "the end of the instance")
    # The next instance is different, and forged messages of it are bounded too.
    assert box.run("link.say(stream, END, RESULT)")["status"] == "success"


@pytest.mark.quick
def test_an_execution_of_a_hostile_image_fails_with_cause_protocol(
    hostile: Target, box: Box
) -> None:
    for code in ATTACKS.values():
        attacked(hostile, box, code)
    assert re.search(r"nan|inf", hostile.client.get("/metrics").text, re.IGNORECASE) is None


@pytest.mark.parametrize("code", MORE.values(), ids=MORE.keys())
def test_any_attack_of_a_hostile_image_fails_cleanly(hostile: Target, box: Box, code: str) -> None:
    attacked(hostile, box, code)


def test_forged_replies_about_files_are_errors_of_the_executor(hostile: Target, box: Box) -> None:
    for path in ("files?path=lie", "contexts", "processes"):
        assert box.run("link.say(stream, END, RESULT)")["status"] == "success"
        answer = hostile.client.get(f"{box.url}/{path}")
        assert answer.status_code == 502, (path, answer.text)
        assert answer.json()["code"] == "protocol_violation"


def test_an_image_that_never_sends_a_hello_starts_no_session(hostile: Target) -> None:
    answer = hostile.client.post("/api/v1/sessions", json={"template_id": "mute"})
    assert 500 <= answer.status_code < 600, answer.text
    assert "did not answer" in answer.json()["detail"]


@settings(max_examples=8)
@given(scripts("run"))
def test_an_execution_ends_whatever_the_image_sends(hostile: Target, script: list[Said]) -> None:
    box = hostile.box(template_id="python3")
    before = resident(hostile.pid)
    play(box, script)
    assert resident(hostile.pid) - before < 64 * MiB
    assert hostile.client.delete(box.url).is_success


# Other ways


def test_an_ordinary_user_can_end_an_instance_of_a_hostile_image(tmp_path: Path) -> None:
    with hostile_server(tmp_path, START_TIMEOUT, "unprivileged") as target:
        box = target.box(template_id="python3")
        for why, code in BYTES.items():
            if why != ERRORS:
                attacked(target, box, code, why)


def test_an_instance_of_a_hostile_image_in_a_container_can_be_ended(
    contained: tuple[str, Target],
) -> None:
    kind, target = contained
    box = target.box(template_id="python3")
    for why, code in BYTES.items():
        if kind in RELAYED or why != ERRORS:
            attacked(target, box, code, why)
    assert target.client.delete(box.url).is_success


def test_an_image_that_does_not_start_leaves_no_container(
    engines: Callable[[str], Target], dockerd: Dockerd, runsc: str
) -> None:
    """All concurrently: each case takes the start timeout of an executor."""
    cases = {
        **{(kind, "mute"): "did not answer" for kind in ENGINES},
        ("docker", "silent"): "was not ready",
        ("docker", "loud"): "bytes before it was ready",
    }
    servers = {kind: engines(kind) for kind in ENGINES}
    before = {kind: resident(server.pid) for kind, server in servers.items()}
    containers = {one["Id"] for one in dockerd.containers()}

    def create(case: tuple[str, str]) -> dict[str, Any]:
        kind, name = case
        answer = servers[kind].client.post("/api/v1/sessions", json={"template_id": name})
        assert answer.is_server_error, answer.text
        problem: dict[str, Any] = answer.json()
        return problem

    with ThreadPoolExecutor() as pool:
        problems = list(pool.map(create, cases))
    for (case, words), problem in zip(cases.items(), problems, strict=True):
        assert words in problem["detail"], (case, problem)
        # That would have it started on other nodes too.
        assert problem["code"] != "engine_unavailable", case
    for kind, server in servers.items():
        assert resident(server.pid) - before[kind] < 64 * MiB, kind
    eventually(
        lambda: {one["Id"] for one in dockerd.containers()} <= containers,
        "the removal of the containers",
    )
