"""Messages of a console in both directions."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime

import pytest

from atoll.api.ws import messages
from atoll.api.ws.messages import Close, FromClient, Resize, Signal, Stdin
from atoll.errors import Conflict, InvalidRequest
from atoll.model.execution import Execution, ExecutionStatus, Outcome, Request
from atoll.model.session import Cause
from atoll.protocol import frames
from atoll.service.executions.console import Output, State


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"ls\n", Stdin(b"ls\n"), id="bytes are input"),
        pytest.param(b'{"type":"close"}', Stdin(b'{"type":"close"}'), id="bytes are never JSON"),
        pytest.param(b"", Stdin(b""), id="no bytes"),
        pytest.param('{"type":"stdin","data":"é\\n"}', Stdin("é\n".encode()), id="text"),
        pytest.param('{"type":"stdin","data":"\\ud800"}', Stdin(b"?"), id="half a pair"),
        pytest.param('{"type":"stdin","base64":"AP8="}', Stdin(b"\x00\xff"), id="base64"),
        pytest.param('{"type":"stdin","eof":true}', Stdin(b"", eof=True), id="end of input"),
        pytest.param(
            '{"type":"stdin","data":"x","eof":true}', Stdin(b"x", eof=True), id="last input"
        ),
        pytest.param('{"type":"resize","rows":24,"cols":80}', Resize(24, 80), id="resize"),
        pytest.param('{"type":"signal","signal":"INT"}', Signal(2), id="signal"),
        pytest.param('{"type":"signal","signal":"SIGTERM"}', Signal(15), id="long name"),
        pytest.param('{"type":"close"}', Close(), id="detach"),
        pytest.param('{"type":"close","end":true,"more":1}', Close(end=True), id="end"),
    ],
)
def test_a_valid_message_is_parsed(data: bytes | str, message: FromClient) -> None:
    assert messages.parse(data) == message


@pytest.mark.parametrize(
    "data",
    [
        "", "garbage", "[]", "null", '"stdin"', "{}", '{"type":null}', '{"type":"stdout"}',
        '{"type":["stdin"]}', '{"type":"stdin"}', '{"type":"stdin","data":1}',
        '{"type":"stdin","data":"a","base64":"YQ=="}', '{"type":"stdin","base64":"*"}',
        '{"type":"stdin","base64":"é"}', '{"type":"stdin","data":"a","eof":1}',
        '{"type":"resize"}', '{"type":"resize","rows":0,"cols":80}',
        '{"type":"resize","rows":24,"cols":70000}', '{"type":"resize","rows":"24","cols":80}',
        '{"type":"resize","rows":true,"cols":80}', '{"type":"resize","rows":24.5,"cols":80}',
        '{"type":"close","end":"yes"}', "[" * 30_000, '{"a":' * 10_000,
    ],
)  # fmt: skip
def test_an_invalid_message_is_refused_with_a_reason(data: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        messages.parse(data)
    assert refused.value.code == "bad_message"
    assert refused.value.message


@pytest.mark.parametrize("name", ["", "SIG", "int", "SEGV", 2, None, ["INT"], {"a": 1}])
def test_only_some_signals_may_be_sent(name: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        messages.parse(json.dumps({"type": "signal", "signal": name}))
    assert refused.value.code == "unknown_signal"


def test_output_is_binary_or_json_as_requested() -> None:
    piece = Output(frames.STDOUT, b"\x1b[1m\xff", 7)
    assert list(messages.output(piece, as_json=False)) == [b"\x1b[1m\xff"]
    (sent,) = messages.output(piece, as_json=True)
    assert json.loads(sent) == {"type": "stdout", "base64": "G1sxbf8=", "position": 7}
    (sent,) = messages.output(Output(frames.STDERR, b"no", 8), as_json=False)
    assert json.loads(sent)["type"] == "stderr"


def test_a_large_piece_is_split_and_its_position_counts_after_the_last_part() -> None:
    data = bytes(range(256)) * 600
    parts = [json.loads(part) for part in messages.output(Output(1, data, 5), as_json=True)]
    assert b"".join(base64.b64decode(part["base64"]) for part in parts) == data
    assert [part["position"] for part in parts] == [4, 4, 5]


def test_an_error_has_a_code_and_details() -> None:
    error = Conflict("It does not run.", code="execution_not_running", status_now="pending")
    assert json.loads(messages.error(error)) == {
        "type": "error",
        "code": "execution_not_running",
        "message": "It does not run.",
        "status_now": "pending",
    }


def test_a_status_and_an_exit_name_their_execution() -> None:
    state = State(ExecutionStatus.RUNNING, attempt=0, typing=True)
    assert json.loads(messages.status(state, "exec_1", terminal=True)) == {
        "type": "status",
        "execution_id": "exec_1",
        "status": "running",
        "attempt": 1,
        "typing": True,
        "terminal": True,
    }
    outcome = Outcome(ExecutionStatus.FAILED, Cause.SIGNAL, 130, signal="SIGINT")
    ended = Execution(
        "exec_1", "sess_1", Request(), ExecutionStatus.FAILED, datetime.now(UTC), outcome=outcome
    )
    assert json.loads(messages.exit_(ended)) == {
        "type": "exit",
        "execution_id": "exec_1",
        "status": "failed",
        "exit_code": 130,
        "signal": "SIGINT",
        "cause": "signal",
        "error": None,
    }
