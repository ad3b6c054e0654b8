"""Printed results: escaping of untrusted text."""

from __future__ import annotations

import json

import pytest

from atoll.cli import execution_output, output
from atoll.sdk.values import ErrorInfo, Result


def test_json_contains_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"said": "\x1b[2J \x9b2J \x7f \u202e \U000e0001 \ud800 é \n"}
    output.as_json(value)
    output.as_json(value, indent=None)
    shown = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert "é" in shown
    first, last = shown[: shown.index("}") + 1], shown.splitlines()[-1]
    assert json.loads(first) == json.loads(last) == value


def test_foreign_lines_cannot_fake_our_messages(capsys: pytest.CaptureFixture[str]) -> None:
    forged = "a\nerror: forged\x1b[2J"
    output.line(forged)
    output.note(forged)
    output.error(forged, forged)
    error = ErrorInfo("exception", "boom", "Boom", f"Traceback\n{forged}\n")
    execution_output._explain(Result("exec_1", "failed", error=error), "")
    text = capsys.readouterr()
    assert text.out == "a\\nerror: forged\\x1b[2J\n"
    assert text.err.splitlines() == [
        "atoll: a",
        "    error: forged\\x1b[2J",
        "error: a",
        "    error: forged\\x1b[2J (a\\nerror: forged\\x1b[2J)",
        "Traceback",
        "a",
        "error: forged\\x1b[2J",
    ]
