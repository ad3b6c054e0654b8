"""Every file in examples/ runs and prints the expected output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.harness import Server

pytestmark = pytest.mark.quick

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

EMBEDDED = {
    "hello.py": "42\n\n",
    "handler.py": "{'message': 'Hello', 'input': 'Alice'}\nworking\nfailed 1 ZeroDivisionError\n",
    "files.py": "artifacts: report.txt\n2 rows, 7 in all\n",
    "trees.py": "3 files, 30 bytes\n"
    "project/0.upper 1 THIS IS 0\nproject/1.upper 1 THIS IS 1\nproject/2.upper 1 THIS IS 2\n"
    "0.txt 0.upper 1.txt 1.upper 2.txt 2.upper\n",
    "async_many.py": "[0, 1, 4, 9, 16, 25, 36, 49]\n",
    "stream.py": "hello\nreceived one\nsuccess\ncancelled\n",
    "invocations.py": "succeeded 7\nfailed out of stock 1\nsucceeded order 17 is on its way 2\n",
    "long_lived.py": "stopped user\nday 1\nrunning\narchived\nday 1\n"
    "{'draft': 'b'} day 1, again\n{'project': 'report'} day 1\nterminated\n",
    "approval.py": "May I delete these? ['a.tmp', 'report.txt']\n"
    "deleted ['a.tmp']\n"
    "May I delete these? ['report.txt']\n"
    "kept all: these are needed\n",
}
NEEDS_SERVER = {"server.py": "line 0\nline 1\nline 2\nrunning\nterminated\n"}


def run(name: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
        check=False,
    )


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.*")} == {*EMBEDDED, *NEEDS_SERVER}


@pytest.mark.parametrize("name", EMBEDDED)
def test_an_example_runs_without_a_server(name: str, bubblewrap: str, tmp_path: Path) -> None:
    done = run(name, ATOLL_DATA_DIR=str(tmp_path))

    assert (done.returncode, done.stderr, done.stdout) == (0, "", EMBEDDED[name])


@pytest.mark.parametrize("name", NEEDS_SERVER)
def test_an_example_runs_against_a_server(name: str, server: Server) -> None:
    done = run(name, ATOLL_URL=server.url, ATOLL_API_KEY=server.key)

    assert (done.returncode, done.stderr, done.stdout) == (0, "", NEEDS_SERVER[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS_SERVER)
def test_the_server_example_explains_that_it_needs_a_url(name: str) -> None:
    done = run(name)

    assert done.returncode == 1
    assert "ATOLL_URL" in done.stderr
