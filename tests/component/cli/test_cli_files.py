"""The commands for files, against a fake server."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.api import eventually

if TYPE_CHECKING:
    from tests.component.cli.conftest import Command, Start
    from tests.component.sdk.fake_server import FakeServer


def test_files_and_directories_are_copied_in(
    atoll: Command, fake_server: FakeServer, tmp_path: Path
) -> None:
    session_id = atoll("session", "create").stdout.strip()
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "a.txt").write_text("a")
    (tmp_path / "tree" / "sub" / "b.txt").write_text("b")
    (tmp_path / "tree" / "link").symlink_to("/etc/passwd")
    done = atoll("session", "cp", str(tmp_path / "tree" / "a.txt"), f"{session_id}:")
    assert done.exit_code == 0
    assert fake_server.files == {"a.txt": b"a"}
    atoll("session", "cp", str(tmp_path / "tree" / "a.txt"), f"{session_id}:/workspace/x/y.txt")
    assert fake_server.files["x/y.txt"] == b"a"
    fake_server.files.clear()
    os.mkfifo(tmp_path / "tree" / "pipe")
    done = atoll("session", "cp", str(tmp_path / "tree"), f"{session_id}:to/", "--json")
    left_out = ["pipe: a pipe"]
    expected = {"path": "to/tree", "files": 2, "size": 2, "left_out": left_out}
    assert json.loads(done.stdout) == expected
    assert done.stderr == "atoll: left out pipe: a pipe.\n"
    assert fake_server.files["to/tree/sub/b.txt"] == b"b"
    assert fake_server.files["to/tree/link"] == b"/etc/passwd"
    assert atoll("session", "cp", "a", "b").exit_code == 2
    assert atoll("session", "cp", str(tmp_path / "none"), f"{session_id}:x").exit_code == 1


def test_files_and_directories_are_copied_out(
    atoll: Command, fake_server: FakeServer, tmp_path: Path
) -> None:
    session_id = atoll("session", "create").stdout.strip()
    fake_server.files |= {"d/a": b"a", "d/e/b": b"b", "d/l": b"/etc", "d/k": b"e/b", "f": b"f"}
    fake_server.links |= {"d/l", "d/k"}
    done = atoll("session", "cp", f"{session_id}:d", str(tmp_path / "out"))
    assert (done.exit_code, (tmp_path / "out" / "e" / "b").read_bytes()) == (0, b"b")
    left_out = "atoll: left out l: a link that points outside.\n"
    assert done.stderr == left_out + "atoll: 2 file(s) copied, 2 bytes.\n"
    assert not (tmp_path / "out" / "l").is_symlink()
    assert (tmp_path / "out" / "k").readlink() == Path("e/b")
    atoll("session", "cp", f"{session_id}:f", str(tmp_path))
    assert (tmp_path / "f").read_bytes() == b"f"
    assert atoll("session", "cp", f"{session_id}:none", str(tmp_path)).exit_code == 1


@pytest.mark.parametrize("name", ["../x", "a/../../b", "/tmp/x"])
def test_a_remote_name_never_leaves_the_target(
    atoll: Command, fake_server: FakeServer, tmp_path: Path, name: str
) -> None:
    session_id = atoll("session", "create").stdout.strip()
    fake_server.files[f"d/{name}"] = b"evil"
    done = atoll("session", "cp", f"{session_id}:d", str(tmp_path / "out"))
    assert done.exit_code == 1
    assert "(unsafe_name)" in done.stderr
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


@pytest.mark.slow
def test_one_file_is_copied_through_stdin_and_stdout(
    start: Start, atoll: Command, fake_server: FakeServer, tmp_path: Path
) -> None:
    session_id = atoll("session", "create").stdout.strip()
    process = start("session", "cp", "-", f"{session_id}:in/x", stdin=subprocess.PIPE)
    _, err = process.communicate(b"a\0b")
    assert (process.returncode, fake_server.files) == (0, {"in/x": b"a\0b"}), err
    process = start("session", "cp", f"{session_id}:in/x", "-")
    assert process.communicate() == (b"a\0b", b"atoll: 1 file(s) copied, 3 bytes.\n")
    process = start("session", "cat", f"{session_id}:in/x", f"{session_id}:in/x")
    assert process.communicate() == (b"a\0ba\0b", b"")
    assert atoll("session", "cp", "-", f"{session_id}:").exit_code == 2


def test_ctrl_c_ends_a_copy_that_waits_for_stdin(
    start: Start, atoll: Command, fake_server: FakeServer
) -> None:
    session_id = atoll("session", "create").stdout.strip()
    reading, writing = os.pipe()
    try:
        process = start("session", "cp", "-", f"{session_id}:x", stdin=reading)
        os.write(writing, b"some")
        eventually(lambda: not select.select([reading], [], [], 0)[0])
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert "x" not in fake_server.files
    finally:
        os.close(reading)
        os.close(writing)


def test_files_are_listed_and_removed(atoll: Command, fake_server: FakeServer) -> None:
    session_id = atoll("session", "create").stdout.strip()
    fake_server.files |= {"d/a": b"aaa", "d/e/b": b"b", "d/\x1b[31m": b"", "d/n\n0644 forged": b""}
    done = atoll("session", "ls", f"{session_id}:d")
    assert done.stdout.splitlines() == [
        "0644            0 2024-05-01 12:00:00+00:00 d/\\x1b[31m",
        "0644            3 2024-05-01 12:00:00+00:00 d/a",
        "0644            0 2024-05-01 12:00:00+00:00 d/e/",
        "0644            0 2024-05-01 12:00:00+00:00 d/n\\n0644 forged",
    ]
    lines = atoll("session", "ls", f"{session_id}:d", "--json").stdout.splitlines()
    assert [json.loads(line)["path"] for line in lines] == [
        "d/\x1b[31m",
        "d/a",
        "d/e",
        "d/n\n0644 forged",
    ]
    assert atoll("session", "rm", f"{session_id}:d/a").exit_code == 0
    assert "d/a" not in fake_server.files
    assert atoll("session", "rm", f"{session_id}:").exit_code == 2
    assert fake_server.sessions[session_id]["status"] == "running"
    assert atoll("session", "rm", session_id).stdout == f"{session_id}\n"


def test_watch_prints_a_line_per_event_and_ends_with_the_directory(
    atoll: Command, fake_server: FakeServer
) -> None:
    session_id = atoll("session", "create").stdout.strip()
    moved = {"encoded_path": "b", "encoded_from": "a%FF"}
    fake_server.watched = [
        [("watching", {}), ("moved", moved), ("end", {"code": "file_not_found"})],
    ]
    done = atoll("session", "watch", f"{session_id}:d", "--flat")
    assert done.stdout == "watching\nmoved a\\udcff -> b\n"
    assert fake_server.bodies[-1] == {"path": "d", "recursive": "false"}


def test_a_checkpoint_is_created_and_shown(atoll: Command, fake_server: FakeServer) -> None:
    session_id = atoll("session", "create").stdout.strip()
    assert atoll("session", "checkpoint", session_id, "--last").exit_code == 1
    made = json.loads(atoll("session", "checkpoint", session_id, "--json").stdout)
    assert (made["session_id"], made["number"]) == (session_id, 1)
    assert "number" in atoll("session", "checkpoint", session_id, "--last").stdout
