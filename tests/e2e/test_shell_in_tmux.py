"""`atoll session shell` on a real terminal, provided and inspected by tmux."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.api import Api, eventually
from tests.e2e.console import begin, console
from tests.harness import Server
from tests.missing import missing
from tests.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 30.0
PROMPT = "here>"


class Screen:
    """A terminal with a plain shell, as a user sees it."""

    def __init__(self, tmux: str, socket: Path, env: dict[str, str]) -> None:
        self._tmux = [tmux, "-S", str(socket), "-f", "/dev/null"]
        try:
            self._run("new-session", "-d", "-x", "100", "-y", "30", "sh", env=env)
            self.type("PS1='he''re> '; clear")
            self.until(lambda text: text.startswith(PROMPT))
        except BaseException:
            self.close()
            raise

    def _run(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        return subprocess.run(
            [*self._tmux, *arguments],
            env=env,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout

    def text(self) -> str:
        return self._run("capture-pane", "-p")

    def type(self, line: str) -> None:
        self._run("send-keys", "-l", line)
        self.keys("Enter")

    def keys(self, *names: str) -> None:
        self._run("send-keys", *names)

    def resize(self, rows: int, cols: int) -> None:
        self._run("resize-window", "-x", str(cols), "-y", str(rows))

    def until(self, met: Callable[[str], object]) -> str:
        deadline = time.monotonic() + PATIENCE
        while not met(text := self.text()):
            assert time.monotonic() < deadline, f"it is not on the screen:\n{text}"
            time.sleep(0.02)
        return text

    def wait(self, text: str) -> str:
        return self.until(lambda screen: text in screen)

    def pane_value(self, name: str) -> str:
        """What tmux knows of the pane."""
        return self._run("display-message", "-p", f"#{{{name}}}").strip()

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, check=False)


@pytest.fixture
def screen(server: Server, tmp_path: Path) -> Iterator[Screen]:
    yield from _screen(server, tmp_path)


def _screen(server: Server, tmp_path: Path) -> Iterator[Screen]:
    tmux = shutil.which("tmux")
    if tmux is None:
        missing("tmux is not installed")
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TMUX")},
        "ATOLL_URL": server.url,
        "ATOLL_API_KEY": server.key,
        "LC_ALL": "C.UTF-8",
    }
    screen = Screen(tmux, tmp_path / "tmux", env)
    try:
        yield screen
    finally:
        screen.close()


def shell(*arguments: str) -> str:
    """The command line, which prints its exit code afterwards."""
    command = [sys.executable, "-m", "atoll.cli", "session", "shell", *arguments]
    return f"clear; {shlex.join(command)}; echo ended with $?"


def inside(screen: Screen) -> None:
    """Wait until the shell in the sandbox accepts input."""
    screen.until(lambda text: re.search(r"\$ *$", text.rstrip("\n")))


def settings_of(screen: Screen) -> str:
    """What the terminal is set to."""
    screen.type("clear; stty -g")
    text = screen.until(lambda text: re.search(r"^[0-9a-f]+(:[0-9a-f]+)+$", text, re.MULTILINE))
    found = re.search(r"^[0-9a-f:]+$", text, re.MULTILINE)
    assert found is not None
    return found[0]


@pytest.mark.quick
def test_a_shell_behaves_like_a_local_one(screen: Screen, session: str) -> None:
    before = settings_of(screen)
    screen.type(shell(session))
    inside(screen)
    screen.type("stty size; echo $TERM; pwd; echo $((6*7))")
    screen.wait("30 100\n")
    screen.wait("/workspace\n42\n")
    assert re.search(r"^(tmux|screen)", screen.text(), re.MULTILINE)
    screen.resize(40, 120)
    screen.type("clear; stty size")
    screen.wait("40 120\n")
    screen.type("clear; sh -c \"echo be''gun; exec sleep 100\"")
    screen.wait("begun\n")
    screen.keys("C-c")
    screen.wait("^C")
    screen.type("echo and $?")
    screen.wait("and 130\n")
    screen.type("exit 7")
    screen.wait("ended with 7\n")
    assert settings_of(screen) == before


@pytest.mark.parametrize("program", ["less", "vi", "curses"])
def test_full_screen_programs_draw_and_restore_the_screen(
    screen: Screen, session: str, api: Api, program: str
) -> None:
    api.put(session, "lines", b"".join(b"line %d\n" % number for number in range(500)))
    api.put(session, "draw.py", CURSES)
    screen.type(shell(session))
    inside(screen)
    start, drawn, quit_ = {
        "less": ("less lines", "line 28", ["q"]),
        "vi": ("vi lines", "line 28", ["Escape", ":", "q", "!", "Enter"]),
        "curses": ("python3 draw.py", "30 x 100", ["q"]),
    }[program]
    screen.type(start)
    screen.wait(drawn)
    assert screen.pane_value("alternate_on") == "1"
    screen.resize(36, 110)
    screen.wait({"curses": "36 x 110"}.get(program, "line 34"))
    if program == "curses":
        screen.keys("Up")
        screen.wait("key KEY_UP")
    else:
        screen.keys("C-f")
        screen.until(lambda text: "line 0\n" not in text)
    screen.keys(*quit_)
    screen.until(lambda text: screen.pane_value("alternate_on") == "0")
    screen.type("echo ba''ck; exit")
    screen.wait("back\n")
    screen.wait("ended with 0\n")


CURSES = b"""
import curses

def main(screen):
    key = "none"
    while key != "q":
        screen.erase()
        screen.border()
        screen.addstr(2, 4, "%d x %d" % screen.getmaxyx())
        screen.addstr(3, 4, "key " + key)
        screen.refresh()
        key = screen.getkey()

curses.wrapper(main)
"""


ASKS = rb"""
import os, tty
tty.setraw(0)
os.write(1, b"\x1b[6n\x1b[c\x1b[>c")
heard = b""
while heard.count(b"c") < 2:
    heard += os.read(0, 100)
os.write(1, b"\r\nasked\r\n")
heard = b""
while not heard.endswith(b"q"):
    heard += os.read(0, 100)
os.write(1, b"heard %a\r\n" % heard)
"""


def test_replayed_terminal_queries_are_not_answered(screen: Screen, session: str, api: Api) -> None:
    api.put(session, "asks.py", ASKS)
    screen.type(shell(session, "--", "python3", "asks.py"))
    screen.wait("asked\n")
    screen.keys("C-p", "C-q")
    text = screen.wait("ended with 0\n")
    execution = re.search(r"exec_\d{8}_[0-9a-f]{20}", text.replace("\n", ""))
    assert execution is not None
    # Otherwise old text on the screen would match.
    screen.type("clear; echo cl''ear")
    screen.wait("clear\n")
    screen.type(shell("--attach", execution[0]))
    screen.wait("asked\n")
    screen.keys("Up", "q")
    screen.wait(r"heard b'\x1b[Aq'")


def test_a_waiting_user_sees_a_notice(screen: Screen, session: str) -> None:
    screen.type(shell(session, "-c", "echo begun; sleep 100"))
    screen.wait("begun\n")
    screen.keys("C-p", "C-q")
    screen.wait("ended with 0\n")
    screen.type(shell(session))
    screen.wait("atoll: waiting for the session\n")


def test_a_user_who_detaches_can_reattach(screen: Screen, session: str, api: Api) -> None:
    api.put(session, "draw.py", CURSES)
    before = settings_of(screen)
    screen.type(shell(session, "--", "python3", "draw.py"))
    screen.wait("30 x 100")
    screen.keys("C-p", "C-q")
    screen.wait("ended with 0\n")
    text = screen.wait("--attach exec_")
    assert screen.pane_value("alternate_on") == "0"
    assert screen.pane_value("cursor_flag") == "1"
    assert settings_of(screen) == before
    execution = re.search(r"--attach (exec_\d{8}_[0-9a-f]{20})", text.replace("\n", ""))
    assert execution is not None
    assert api.status(execution[1]) == "running"
    screen.resize(25, 90)
    screen.type(shell("--attach", execution[1]))
    screen.wait("25 x 90")
    screen.keys("x")
    screen.wait("key x")
    screen.keys("q")
    screen.wait("ended with 0\n")
    assert api.result(execution[1])["exit_code"] == 0


def test_a_watching_user_detaches_with_an_interrupt(screen: Screen, session: str, api: Api) -> None:
    execution = begin(api, session, terminal={"rows": 24, "cols": 80})
    with console(api, execution) as typing:
        typing.ready().send("echo he''re\n").until("here")
        screen.type(shell("--attach", execution, "--watch"))
        screen.wait("here\n")
        screen.type("never")
        typing.send("echo al''so\n")
        screen.wait("also\n")
        assert "never" not in screen.text()
        screen.keys("C-c")
        screen.wait("ended with 0\n")
        typing.send("exit\n").ended()


def test_the_terminal_is_restored_however_the_command_ends(
    screen: Screen, session: str, api: Api
) -> None:
    before = settings_of(screen)
    screen.type(shell(session, "--", "vi", "-u", "NONE"))
    screen.until(lambda text: screen.pane_value("alternate_on") == "1")
    pane = int(screen.pane_value("pane_pid"))
    child = int(Path(f"/proc/{pane}/task/{pane}/children").read_text().split()[0])
    os.kill(child, signal.SIGTERM)
    screen.wait("ended with 143\n")
    assert screen.pane_value("alternate_on") == "0"
    assert settings_of(screen) == before
    listed = api.http.get(f"/api/v1/sessions/{session}/executions").json()["items"]
    eventually(lambda: api.status(listed[0]["id"]) == "cancelled")


def test_a_session_created_for_one_shell_ends_with_it(screen: Screen, api: Api) -> None:
    screen.type(shell("--memory", "300Mi"))
    inside(screen)
    (made, *_) = api.http.get("/api/v1/sessions?status=running").json()["items"]
    assert made["resources"]["memory"] == "300Mi"
    screen.keys("C-d")
    screen.wait("ended with 0\n")
    assert api.get(made["id"])["status"] == "terminated"


def test_a_shell_continues_when_its_server_is_restarted(bubblewrap: str, tmp_path: Path) -> None:
    for name in ("server", "screen"):
        (tmp_path / name).mkdir()
    with Server(tmp_path / "server", "--port", str(free_port())) as own:
        for screen in _screen(own, tmp_path / "screen"):
            with own.client() as http:
                session = Api(http).create()["id"]
            screen.type(shell(session))
            inside(screen)
            screen.type("X=kept; echo be''fore")
            screen.wait("before\n")
            own.stop(signal.SIGKILL)
            own.start()
            # Input without a server is queued.
            screen.type("echo $X; exit 9")
            screen.wait("kept\n")
            text = screen.wait("ended with 9\n")
            assert text.count("before\n") == 1


# Without a terminal


def atoll(server: Server, *arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "ATOLL_URL": server.url, "ATOLL_API_KEY": server.key}
    return subprocess.run(
        [sys.executable, "-m", "atoll.cli", "session", "shell", *arguments],
        env=env, capture_output=True, check=False, timeout=60, **options,
    )  # fmt: skip


def test_piped_input_is_read_to_its_end(server: Server, session: str) -> None:
    script = b"echo out; echo err >&2; test -t 0 || exit 5\n"
    done = atoll(server, session, input=script)
    assert (done.returncode, done.stdout, done.stderr) == (5, b"out\n", b"err\n")
    done = atoll(server, session, "-c", "wc -c", input=b"x" * 3_000_000)
    assert (done.returncode, done.stdout) == (0, b"3000000\n")
    done = atoll(server, session, "--", "cat", stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (0, b"")
    # A program that ends before its input does.
    done = atoll(server, session, "-c", "head -c 3", input=b"abc" * 1_000_000)
    assert (done.returncode, done.stdout) == (0, b"abc")


def test_the_exit_code_shows_timeouts_and_signals(server: Server, session: str) -> None:
    assert atoll(server, session, "-t", "0.3", "-c", "sleep 60").returncode == 124
    assert atoll(server, session, "-c", "kill -9 $$").returncode == 137
    gone = atoll(server, session, "--", "no-such-program")
    assert gone.returncode == 127
    assert b"no-such-program is not installed in this sandbox" in gone.stderr


def test_invalid_options_are_reported(server: Server) -> None:
    for words in (["--attach", "exec_x", "-c", "ls"], ["sess_x", "--cpu", "1"], ["--watch"]):
        assert atoll(server, *words).returncode == 2
    missing = atoll(server, "sess_none")
    assert (missing.returncode, b"session_not_found" in missing.stderr) == (1, True)
    missing = atoll(server, "--attach", "exec_none")
    assert (missing.returncode, b"execution_not_found" in missing.stderr) == (1, True)
