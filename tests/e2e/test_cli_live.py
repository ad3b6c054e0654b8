"""Commands that run code in a real sandbox."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness import Server

pytestmark = pytest.mark.quick

ASK = "from atoll_session import ask\nprint(ask('Go on?', {'n': 1}))\n"


def start(*arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "atoll.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


def test_ctrl_c_cancels_the_code_with_a_note(bubblewrap: str, tmp_path: Path) -> None:
    code = "import time\nprint('on', flush=True)\ntime.sleep(60)"
    with start("run", "--code", code, ATOLL_DATA_DIR=str(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("was cancelled.\n")


@pytest.mark.slow
def test_a_question_is_refused_without_a_terminal(bubblewrap: str, tmp_path: Path) -> None:
    with start("run", "--code", ASK, ATOLL_DATA_DIR=str(tmp_path)) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, 'atoll: approval requested: Go on? {"n": 1}\n')
    assert out == "Answer(approved=False, answer=None, reason='There is no terminal to ask on.')\n"


def test_a_question_is_answered_by_another_command(server: Server) -> None:
    to = {"ATOLL_URL": server.url, "ATOLL_API_KEY": server.key}

    def done(*arguments: str) -> str:
        with start(*arguments, **to) as process:
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        return out

    session = done("session", "create").strip()
    with start("session", "exec", session, "--code", ASK, **to) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == 'atoll: approval requested: Go on? {"n": 1}\n'
        execution = process.stderr.readline().split("approve ")[1].split(",")[0]
        done("execution", "approve", execution, "--answer", '"yes"')
        out, _ = process.communicate(timeout=60)
    assert out == "Answer(approved=True, answer='yes', reason=None)\n"
    assert '"state": "answered"' in done("execution", "events", execution)
    done("session", "rm", session)
