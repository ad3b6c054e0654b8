from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Protocol

import pytest
from typer.testing import CliRunner

from atoll.cli.commands import tree
from tests.component.sdk.fake_server import KEY, FakeServer, ServerThread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typer.testing import Result


class Command(Protocol):
    def __call__(self, *arguments: str, input: bytes = b"") -> Result: ...


class Start(Protocol):
    def __call__(self, *arguments: str, stdin: int | None = None) -> subprocess.Popen[bytes]: ...


@pytest.fixture
def fake_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    fake_server = FakeServer()
    with ServerThread(fake_server):
        monkeypatch.setenv("ATOLL_URL", fake_server.url)
        monkeypatch.setenv("ATOLL_API_KEY", KEY)
        yield fake_server


@pytest.fixture
def atoll() -> Command:
    """The command line in this process: quick, and coverage sees it."""
    return lambda *words, input=b"": CliRunner().invoke(tree(), list(words), input=input)


@pytest.fixture
def start() -> Iterator[Start]:
    """The command line as a separate process with piped stdout and stderr."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, stdin: int | None = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "atoll.cli", *arguments],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(os.environ),
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        with process:
            process.kill()
