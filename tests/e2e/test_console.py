"""Consoles over WebSockets: typed to, watched, left and found again."""

from __future__ import annotations

import base64
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests import drivers, preloaded
from tests.e2e.api import Api, eventually
from tests.e2e.console import begin, console, refusal
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.quick

SHELL = {"rows": 30, "cols": 100}


@pytest.fixture
def own(bubblewrap: str, tmp_path: Path) -> Iterator[Server]:
    """A server for one test to end or to kill."""
    # Time for connected clients to leave, longer than `stop` waits for the server.
    with Server(tmp_path, ATOLL_POOL__SIZE="0", ATOLL_SHUTDOWN_TIMEOUT="250") as server:
        yield server


@pytest.fixture
def reader(server: Server, api: Api) -> dict[str, str]:
    """A key that may only read."""
    made: dict[str, str] = json.loads(keys(server, "create", "reader", "--scope", "read", "--json"))
    headers = {"Authorization": f"Bearer {made['key']}"}
    # A key created by another process becomes valid within seconds.
    eventually(lambda: api.http.get("/api/v1/sessions", headers=headers).status_code == 200)
    return made


def keys(server: Server, *arguments: str) -> str:
    done = preloaded.run("key", *arguments, "--data-dir", str(server.data_dir))
    assert done.returncode == 0, done.stderr
    return done.stdout


# A terminal


def test_a_terminal_takes_input_and_reports_the_exit_code(api: Api, session: str) -> None:
    execution = begin(api, session, terminal=SHELL)
    with console(api, execution) as shell:
        shell.ready().send("echo $((6*7)); tty\n").until("42\r\n/dev/pts/")
        shell.send(b"exit 3\n")
        ended = shell.ended()
    assert (ended["exit_code"], ended["status"], ended["cause"]) == (3, "failed", "exit")
    assert shell.statuses[-1]["terminal"] is True
    assert api.execution(execution)["exit_code"] == 3


def test_input_can_be_bytes_text_or_base64(api: Api, session: str) -> None:
    execution = begin(api, session, command=["cat", "-v"], terminal=SHELL)
    with console(api, execution) as cat:
        cat.ready().send(b"one\n").until("one\r\none\r\n")
        cat.send_message(type="stdin", data="zwei é\n").until("zwei M-CM-)")
        cat.send_message(type="stdin", base64=base64.b64encode(b"\xffthree\n").decode()).until(
            "M-^?three"
        )
        cat.send_message(type="stdin", eof=True)
        assert cat.ended()["exit_code"] == 0


def test_the_size_follows_the_typing_client(api: Api, session: str) -> None:
    execution = begin(api, session, terminal=SHELL)
    with console(api, execution) as shell:
        shell.ready().send("stty size\n").until("30 100\r\n")
        shell.send("trap 'echo changed to `stty size`' WINCH; echo re''ady\n").until("ready\r\n")
        shell.send_message(type="resize", rows=50, cols=132)
        shell.send("stty size\n").until("50 132\r\n").send("\n").until("changed to 50 132")
        with console(api, execution) as other:
            other.until("50 132")
            other.send_message(type="resize", rows=10, cols=10)
            other.send("x").refused("console_taken")
            shell.send("echo; stty size; echo still\n").until("still\r\n")
            assert b"10 10" not in shell.output
        shell.send("exit\n").ended()


def test_a_size_sent_before_the_start_applies_at_the_start(api: Api, session: str) -> None:
    first = api.submit(session, "import time; time.sleep(60)")
    execution = begin(api, session, terminal=SHELL)
    with console(api, execution) as shell:
        shell.wait(lambda: shell.typing)
        assert shell.statuses[-1]["status"] == "pending"
        shell.send_message(type="resize", rows=33, cols=44)
        shell.send("x").refused("execution_not_running")
        api.http.post(f"/api/v1/executions/{first}/cancel")
        shell.ready().send("stty size\n").until("33 44\r\n")
        shell.send("exit\n").ended()


@pytest.mark.every_driver
@pytest.mark.parametrize("how", ["byte", "signal"])
def test_an_interrupt_reaches_the_foreground_process(api: Api, session: str, how: str) -> None:
    execution = begin(api, session, terminal=SHELL)
    with console(api, execution) as shell:
        # In the foreground before it prints, unlike a list of commands.
        shell.ready().send("sh -c \"echo be''gun; exec sleep 100\"\n").until("begun\r\n")
        if how == "byte":
            shell.send(b"\x03")
        else:
            shell.send_message(type="signal", signal="INT")
        shell.until("^C") if how == "byte" else None
        shell.send("echo an''d $?\n").until("and 130")
        shell.send("exit 0\n").ended()


def test_an_interrupt_reaches_python_on_a_terminal(api: Api, session: str) -> None:
    code = (
        "import time\ntry:\n    print('up', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('interrupted')"
    )
    execution = begin(api, session, code=code, terminal=SHELL)
    with console(api, execution) as running:
        running.ready().until("up\r\n").send(b"\x03").until("interrupted\r\n")
        assert running.ended()["exit_code"] == 0


@pytest.mark.parametrize(("name", "cause"), [("TERM", "SIGTERM"), ("KILL", "SIGKILL")])
def test_a_signal_can_end_an_execution(api: Api, session: str, name: str, cause: str) -> None:
    execution = begin(api, session, command=["sleep", "100"], terminal=SHELL)
    with console(api, execution) as running:
        running.ready().send_message(type="signal", signal=name)
        assert running.ended()["signal"] == cause


# Pipes


def test_executions_with_pipes_take_input_and_can_be_watched(api: Api, session: str) -> None:
    code = "import sys\nfor line in sys.stdin: print('got', line, end='', file=sys.stderr)\n"
    execution = begin(api, session, code=code, stdin_open=True)
    with console(api, execution) as running:
        running.ready()
        assert running.statuses[-1]["terminal"] is False
        running.send("one\n").until("got one\n")
        running.send_message(type="resize", rows=2, cols=2).send_message(
            type="stdin", data="two\n", eof=True
        )
        assert running.ended()["exit_code"] == 0
    assert running.output == b"got one\ngot two\n"
    assert api.execution(execution)["stderr"] == "got one\ngot two\n"


def test_an_execution_without_open_input_can_only_be_watched(api: Api, session: str) -> None:
    execution = api.submit(session, "import time\nprint('up', flush=True)\ntime.sleep(60)")
    with console(api, execution) as running:
        running.ready().until("up").send("x").refused("stdin_closed")
        running.send_message(type="close", end=True)
        assert running.ended()["status"] == "cancelled"


def test_a_large_output_arrives_completely_and_in_order(api: Api, session: str) -> None:
    execution = begin(api, session, command=["sh", "-c", "read x; seq 100000"], stdin_open=True)
    with console(api, execution) as running:
        running.ready().send("\n").ended()
    assert running.output == b"".join(b"%d\n" % number for number in range(1, 100_001))


# Leaving and coming back


def test_a_reattached_console_replays_its_output(api: Api, session: str) -> None:
    execution = begin(api, session, terminal=SHELL)
    with console(api, execution) as first:
        first.ready().send("echo fi''rst; X=kept\n").until("first\r\n")
        first.send_message(type="close")
        assert first.closed() == (1000, "detached")
    assert api.status(execution) == "running"
    with console(api, execution) as second:
        second.ready().until("first\r\n").send("echo $X\n").until("$X\r\nkept\r\n")
        assert second.output.startswith(first.output)
        second.send("exit\n").ended()


@pytest.mark.every_driver
def test_a_console_with_a_position_receives_only_later_output(api: Api, session: str) -> None:
    execution = begin(api, session, terminal=SHELL)
    with console(api, execution, query={"format": "json"}) as first:
        first.ready().send("echo fi''rst\n").until("first\r\n")
    query = {"format": "json", "after": first.position}
    with console(api, execution, query=query) as second:
        second.ready().send("echo se''cond; exit\n").until("second\r\n").ended()
    assert b"first\r\n" not in second.output
    with console(api, execution, query={"format": "json"}) as late:
        late.ended()
    assert late.output == first.output + second.output
    with console(api, execution, query={**query, "after": second.position}) as nothing:
        nothing.ended()
    assert nothing.output == b""


def test_a_console_of_an_ended_execution_replays_its_output_and_result(
    api: Api, session: str
) -> None:
    result = api.run(session, "import sys; print('out'); print('err', file=sys.stderr)")
    with console(api, result["execution_id"]) as late:
        assert late.ended()["exit_code"] == 0
    assert late.output == b"out\nerr\n"
    assert [status["status"] for status in late.statuses] == ["completed"]


def test_a_console_reports_that_a_queued_execution_was_cancelled(api: Api, session: str) -> None:
    first = api.submit(session, "import time; time.sleep(60)")
    execution = begin(api, session, terminal=SHELL)
    with console(api, execution) as waiting:
        waiting.wait(lambda: waiting.statuses)
        api.http.post(f"/api/v1/executions/{execution}/cancel")
        assert waiting.ended()["status"] == "cancelled"
    api.http.post(f"/api/v1/executions/{first}/cancel")


# Several


def test_the_first_client_types_until_it_leaves_and_all_watch(api: Api, session: str) -> None:
    execution = begin(api, session, terminal=SHELL)
    with ExitStack() as stack:
        first = stack.enter_context(console(api, execution)).ready()
        watcher = stack.enter_context(console(api, execution, query={"mode": "watch"}))
        second = stack.enter_context(console(api, execution))
        third = stack.enter_context(console(api, execution))
        for other in (watcher, second, third):
            other.send("no\n").refused("console_taken")
        first.send("echo on''e\n")
        for each in (first, watcher, second, third):
            each.until("one\r\n")
        first.send_message(type="close").closed()
        second.ready().send("echo tw''o\n")
        for each in (watcher, second, third):
            each.until("two\r\n")
        assert not third.typing
        assert not watcher.typing
        # A client that disconnects without a message leaves too.
        second.socket.socket.close()
        third.ready().send("echo th''ree; exit\n")
        watcher.until("three\r\n").ended()
        assert third.ended() == watcher.exit


def test_the_number_of_watching_clients_is_limited(api: Api, session: str) -> None:
    execution = begin(api, session, terminal=SHELL)
    with ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(console(api, execution, query={"mode": "watch"}))
        assert refusal(api, execution) == (429, "too_many_consoles")
    with console(api, execution) as shell:
        shell.ready().send("exit\n").ended()


# Clients that are slow or rude


def memory_of(server: Server) -> int:
    """Bytes."""
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_a_client_that_does_not_read_delays_no_other_and_uses_no_memory(own: Server) -> None:
    with own.client() as http, ExitStack() as stack:
        api = Api(http)
        session = api.create()["id"]
        execution = begin(api, session, terminal=SHELL)
        shell = stack.enter_context(console(api, execution)).ready()
        deaf = [
            stack.enter_context(
                console(api, execution, max_queue=1, query={"mode": "watch"}, close_timeout=0.1)
            )
            for _ in range(10)
        ]
        before = memory_of(own)
        shell.send("yes 0123456789abcdef | head -c 100000000; echo d''one; exit\n")
        while shell.exit is None:
            shell.receive(60)
            shell.output = shell.output[-100:]
        assert memory_of(own) - before < 64 << 20
        assert shell.ended()["exit_code"] == 0
        assert shell.output.endswith(b"exit\r\n")
        # The server ends without them.
        api.end(session)
        assert own.stop() == 0
        assert deaf[0].closed()[0] != 1000


def test_an_invalid_message_is_refused_and_many_close_the_connection(
    api: Api, session: str
) -> None:
    execution = begin(api, session, terminal=SHELL)
    with console(api, execution) as shell:
        shell.ready()
        for message in ("garbage", "[]", '{"type":"resize","rows":-1}', "[" * 20_000):
            shell.socket.send(message)
        shell.send_message(type="signal", signal="SEGV").refused("unknown_signal")
        assert [error["code"] for error in shell.errors] == [*["bad_message"] * 4, "unknown_signal"]
        shell.send("echo st''ill\n").until("still\r\n")
        for _ in range(15):
            shell.socket.send("{}")
        assert shell.closed() == (1008, "too many invalid messages")
    api.http.post(f"/api/v1/executions/{execution}/cancel")


def test_the_size_of_a_message_is_limited(api: Api, session: str) -> None:
    execution = begin(api, session, command=["sleep", "100"], terminal=SHELL)
    with console(api, execution) as running:
        running.ready().send("x" * 65_536)
        running.send("x" * 65_537)
        assert running.closed()[0] == 1009
    with console(api, execution) as running:
        # Unread output does not delay the close.
        running.ready().send_message(type="signal", signal="KILL")
        assert running.ended()["signal"] == "SIGKILL"


# Permissions


def test_a_key_is_required_and_can_be_sent_as_a_subprotocol(
    api: Api, session: str, server: Server
) -> None:
    execution = begin(api, session, terminal=SHELL)
    assert refusal(api, execution, key="") == (401, "key_missing")
    assert refusal(api, execution, key="wrong") == (401, "key_unknown")
    offered = ["atoll.console", f"atoll.key.{server.key}"]
    wrong = ["atoll.console", "atoll.key.wrong"]
    assert refusal(api, execution, key="", subprotocols=wrong) == (401, "key_unknown")
    assert refusal(api, execution, key="", query={"key": server.key}) == (401, "key_missing")
    with console(api, execution, key="", subprotocols=offered) as shell:
        assert shell.socket.subprotocol == "atoll.console"
        answered = shell.socket.response
        assert answered is not None
        assert server.key not in str(answered.headers)
        shell.ready().send("exit\n").ended()
    assert server.key not in server.stderr()


def test_a_read_only_key_can_watch(api: Api, session: str, reader: dict[str, str]) -> None:
    execution = begin(api, session, terminal=SHELL)
    key = reader["key"]
    with console(api, execution, key=key) as watching, console(api, execution) as shell:
        watching.wait(lambda: watching.statuses)
        watching.send("no\n").refused("key_read_only")
        watching.errors.clear()
        watching.send_message(type="signal", signal="INT").refused("key_read_only")
        watching.errors.clear()
        watching.send_message(type="close", end=True).refused("key_read_only")
        # It did not take the turn of a client that may type.
        shell.ready().send("echo he''re; exit 0\n")
        watching.until("here\r\n")
        assert not watching.typing
        assert watching.ended()["exit_code"] == 0


@pytest.mark.slow
def test_a_revoked_key_closes_its_consoles(
    api: Api, session: str, server: Server, reader: dict[str, str]
) -> None:
    execution = begin(api, session, terminal=SHELL)
    with console(api, execution, key=reader["key"]) as watching:
        watching.wait(lambda: watching.statuses)
        keys(server, "rm", reader["id"])
        assert watching.closed() == (4401, "key_unknown")
    api.http.post(f"/api/v1/executions/{execution}/cancel")


def test_pages_of_other_origins_cannot_connect(api: Api, session: str, server: Server) -> None:
    execution = begin(api, session, terminal=SHELL)
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "", "http://", "//x"):
        assert refusal(api, execution, headers={"Origin": origin}) == (403, "origin_refused")
    own = {"Origin": f"http://{urlsplit(server.url).netloc}"}
    with console(api, execution, headers=own) as shell:
        shell.ready().send("exit\n").ended()


def test_unknown_executions_and_paths_are_not_found(api: Api) -> None:
    assert refusal(api, "exec_none") == (404, "execution_not_found")
    assert refusal(api, "x/y") == (404, "not_found")
    assert refusal(api, "exec_none", query={"format": "xml"}) == (422, "invalid_request")
    assert refusal(api, "exec_none", query={"after": "-1"}) == (422, "invalid_request")
    assert refusal(api, "exec_none", query={"mode": "both"}) == (422, "invalid_request")
    # As an ordinary request there is nothing there.
    assert api.http.get("/api/v1/executions/exec_none/console").status_code == 404


# When the server goes


@pytest.mark.slow
def test_a_client_can_reconnect_to_a_console_after_the_server_was_killed(own: Server) -> None:
    with own.client() as http:
        api = Api(http)
        session = api.create()["id"]
        execution = begin(api, session, terminal=SHELL)
        with console(api, execution, query={"format": "json"}) as first:
            first.ready().send("X=kept; echo fi''rst\n").until("first\r\n")
            own.stop(signal.SIGKILL)
            assert first.closed()[0] == 1006
    own.start()
    with own.client() as http:
        api = Api(http)
        query = {"format": "json", "after": first.position}
        with console(api, execution, query=query) as second:
            second.ready().send("echo $X; exit 4\n").until("kept\r\n")
            assert second.ended()["exit_code"] == 4
        assert b"first" not in second.output
        api.end(session)


def kill_instance(server: Server, api: Api, execution: str) -> None:
    instance = api.execution(execution)["container_id"]
    os.kill(drivers.handle(server.data_dir, instance)["child"], signal.SIGKILL)


def test_a_console_follows_an_execution_to_its_next_attempt(own: Server) -> None:
    query = {"format": "json"}
    with own.client() as http:
        api = Api(http)
        session = api.create()["id"]
        execution = begin(api, session, command=["sh"], stdin_open=True)
        with console(api, execution, query=query) as shell:
            shell.ready().send("X=lost; echo first\n").until("first\n")
            before = shell.position
            kill_instance(own, api, execution)
            shell.wait(lambda: shell.statuses[-1]["status"] == "pending")
            shell.ready().send("echo X=$X.; exit 0\n").until("X=.\n")
            assert shell.statuses[-1]["attempt"] == 2
            assert shell.position > before
            assert shell.ended()["exit_code"] == 0
        with console(api, execution, query={**query, "after": before}) as late:
            late.ended()
        assert late.output == b"X=.\n"
        api.end(session)


def test_a_terminal_execution_is_not_retried_after_its_instance_died(own: Server) -> None:
    with own.client() as http:
        api = Api(http)
        session = api.create()["id"]
        execution = begin(api, session, terminal=SHELL)
        with console(api, execution) as shell:
            shell.ready().send("echo fi''rst\n").until("first\r\n")
            kill_instance(own, api, execution)
            ended = shell.ended()
        assert (ended["status"], ended["cause"]) == ("crashed", "instance_lost")
        assert shell.output.count(b"first\r\n") == 1
        api.end(session)


@pytest.mark.slow
@pytest.mark.every_driver
def test_a_server_that_shuts_down_closes_consoles_at_once(own: Server) -> None:
    with own.client() as http, ThreadPoolExecutor(1) as beside:
        api = Api(http)
        session = api.create()["id"]
        execution = begin(api, session, terminal=SHELL)
        with console(api, execution) as shell:
            shell.ready()
            stopping = beside.submit(own.stop)
            assert shell.closed()[0] == 1012
        assert stopping.result() == 0
    own.start()
    with own.client() as http:
        api = Api(http)
        with console(api, execution) as again:
            again.ready().send("exit\n").ended()
        api.end(session)


def test_consoles_close_when_their_session_ends(api: Api) -> None:
    session = str(api.create()["id"])
    execution = begin(api, session, terminal=SHELL)
    with console(api, execution) as shell:
        shell.ready()
        api.end(session)
        assert shell.ended()["status"] == "cancelled"
    eventually(lambda: api.status(execution) == "cancelled")
