"""The commands for files as processes, against a real server."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.component.sdk.test_sdk_tar import listing_of

if TYPE_CHECKING:
    from tests.harness import Server

pytestmark = pytest.mark.quick


class Atoll:
    """The command."""

    def __init__(self, server: Server) -> None:
        self.env = {**os.environ, "ATOLL_URL": server.url, "ATOLL_API_KEY": server.key}

    def __call__(
        self, *arguments: str | bytes | Path, input: bytes | None = None
    ) -> tuple[int, bytes, str]:
        done = subprocess.run(
            [sys.executable, "-m", "atoll.cli", "session", *arguments],
            input=input, stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True, env=self.env, timeout=60, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr.decode()

    def on_terminal(self, *arguments: str | Path) -> tuple[int, str]:
        """Exit code and what was on the screen, when stderr is a terminal and stdout is not."""
        screen, terminal = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "atoll.cli", "session", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=terminal,
            env={**self.env, "TERM": "xterm", "COLUMNS": "100"},
        )  # fmt: skip
        os.close(terminal)
        shown = b""
        try:
            while piece := os.read(screen, 65536):
                shown += piece
        except OSError:
            pass  # how a terminal reports that the other side is closed
        finally:
            os.close(screen)
        return process.wait(60), shown.decode()


@pytest.fixture
def atoll(server: Server) -> Atoll:
    return Atoll(server)


@pytest.fixture
def session(atoll: Atoll) -> str:
    return atoll("create", "--timeout", "300")[1].decode().strip()


def test_a_tree_is_copied_in_and_out(atoll: Atoll, session: str, tmp_path: Path) -> None:
    source = tmp_path / "tree"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "run").write_text("#!/bin/sh\n")
    (source / "sub" / "run").chmod(0o755)
    (source / "link").symlink_to("sub/run")
    bad = os.fsencode(source) + b"/bad\xff"
    Path(os.fsdecode(bad)).write_bytes(b"bytes")
    assert atoll("cp", "-r", source, f"{session}:") == (
        0, b"", "atoll: 2 file(s) copied, 15 bytes.\n",
    )  # fmt: skip
    code, out, _ = atoll("cp", f"{session}:tree", tmp_path / "out", "--json")
    content = json.loads(out)
    assert (code, content["files"], content["size"], content["left_out"]) == (0, 2, 15, [])
    assert listing_of(tmp_path / "out") == listing_of(source)
    assert (tmp_path / "out" / "sub" / "run").stat().st_mode & 0o777 == 0o755
    # One file by a name that is no text, both ways.
    assert atoll("cp", bad, f"{session}:in/")[0] == 0
    assert atoll("cp", os.fsencode(f"{session}:in/bad") + b"\xff", tmp_path / "out" / "in/")[0] == 0
    assert atoll("cat", os.fsencode(f"{session}:in/bad") + b"\xff") == (0, b"bytes", "")
    lines = atoll("ls", f"{session}:", "-R")[1].decode().splitlines()
    assert [line.split()[-1] for line in lines] == [
        "in/", "in/bad\\udcff", "tree/", "tree/bad\\udcff", "tree/link@", "tree/sub/",
        "tree/sub/run",
    ]  # fmt: skip
    lines = atoll("ls", session, "--glob", "**/run", "--json")[1].decode().splitlines()
    assert [json.loads(line)["path"] for line in lines] == ["tree/sub/run"]


@pytest.mark.slow
def test_a_pipe_carries_a_single_file(atoll: Atoll, session: str) -> None:
    data = os.urandom(2_000_000)
    code, out, err = atoll("cp", "-", f"{session}:x", input=data)
    assert (code, out, err) == (0, b"", "atoll: 1 file(s) copied, 1.9 MiB.\n")
    assert atoll("cp", f"{session}:x", "-")[1] == data
    assert atoll("search", session, "no such text") == (1, b"", "")
    atoll("cp", "-", f"{session}:t", input=b"one\nneedle here\n")
    assert atoll("search", session, "needle") == (0, b"t:2:1: needle here\n", "")
    code, _, err = atoll("cp", f"{session}:none", "-")
    assert (code, "(file_not_found)" in err) == (1, True)
    code, _, err = atoll("rm", f"{session}:x", f"{session}:none")
    assert (code, "(file_not_found)" in err) == (1, True)
    assert atoll("ls", f"{session}:x")[0] == 1
    saved = json.loads(atoll("checkpoint", session, "--json")[1])
    assert (saved["session_id"], saved["files"]) == (session, 1)
    assert json.loads(atoll("checkpoint", session, "--last", "--json")[1]) == saved


@pytest.mark.slow
def test_a_terminal_shows_the_progress(atoll: Atoll, session: str, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "big[red]").write_bytes(os.urandom(5 * 1024 * 1024))
    code, shown = atoll.on_terminal("cp", tmp_path / "d" / "big[red]", f"{session}:")
    assert code == 0, shown
    assert "big[red]" in shown
    assert "5.0/5.0 MiB" in shown
    assert "/s" in shown
    assert "1 file(s) copied, 5.0 MiB." in shown
    code, shown = atoll.on_terminal("cp", tmp_path / "d", f"{session}:")
    assert (code, "5.0/5.0 MiB" in shown) == (0, True), shown
    code, shown = atoll.on_terminal("cp", f"{session}:d", tmp_path / "out")
    assert (code, "5.0/5.0 MiB" in shown or "5.0/? MiB" in shown) == (0, True), shown
    code, shown = atoll.on_terminal("cp", f"{session}:big[red]", "-")
    assert (code, "5.0/5.0 MiB" in shown) == (0, True), shown


@pytest.mark.slow
def test_watch_prints_a_line_per_event(atoll: Atoll, session: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "atoll.cli", "session", "watch", f"{session}:"],
        stdout=subprocess.PIPE, env=atoll.env, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "watching\n"
            atoll("cp", "-", f"{session}:x", input=b"1")
            assert process.stdout.readline() == "created x\n"
            process.send_signal(2)
            assert process.wait(60) == 130
        finally:
            process.kill()
