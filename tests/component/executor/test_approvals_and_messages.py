"""Questions and messages between user code and the link, with a separate supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import atoll.executor.user_module
from atoll.drivers.shared import executor_bundle
from atoll.executor.runs import messages
from atoll.executor.user_module import atoll_session
from atoll.link.client import Link
from atoll.link.errors import ExecutorError, LinkLost
from atoll.protocol import frames, limits
from atoll.settings import LinkSettings
from tests.runs import run_over

pytestmark = pytest.mark.anyio

INSIDE = str(Path(atoll.executor.user_module.__file__).parent)


class RunOutput:
    """Collects output and questions of a run, and notifies waiters."""

    def __init__(self) -> None:
        self.text = b""
        self.approvals: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.lines: asyncio.Queue[str] = asyncio.Queue()

    def started(self) -> None: ...

    def heartbeat(self) -> None: ...

    def output(self, sequence: int, channel: int, data: bytes) -> None:
        if channel == frames.APPROVAL:
            self.approvals.put_nowait(json.loads(data))
            return
        self.text += data
        for line in data.decode().splitlines():
            self.lines.put_nowait(line)

    async def approval(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.approvals.get(), 60)

    async def line(self) -> str:
        return await asyncio.wait_for(self.lines.get(), 60)


class Box:
    """A supervisor, its link, and the name of the socket inside."""

    def __init__(self, link: Link, name: str, path: Path) -> None:
        self.link = link
        self.name = name
        self.path = path

    async def start(
        self, run_id: str, code: str, **fields: Any
    ) -> tuple[RunOutput, asyncio.Task[Any]]:
        """Run Python code that finds `atoll_session` imported."""
        output = RunOutput()
        code = f"import atoll_session as a\na.ADDRESS = chr(0) + {self.name!r}\n{code}"
        request: dict[str, Any] = {
            "id": run_id, "kind": "python", "code": code, "command": None, "event": {},
            "stdin": None, "args": [], "env": {"PYTHONPATH": INSIDE}, "cwd": "/", "timeout": 30.0,
            "output_limit": 1 << 20, "return_limit": 1 << 20, "artifact_limit": 10, "limits": {},
            "watch": {},
        }  # fmt: skip
        running = asyncio.create_task(run_over(self.link, request | fields, output))
        await asyncio.sleep(0)  # Until it is sent.
        return output, running

    async def run(self, run_id: str, code: str, **fields: Any) -> str:
        """The output of code that succeeded."""
        output, running = await self.start(run_id, code, **fields)
        result = await asyncio.wait_for(running, 60)
        assert result["exit_code"] == 0, output.text.decode()
        return output.text.decode()

    async def tell(self, run_id: str, text: str = "") -> None:
        await self.link.call("message", id=run_id, text=text)

    async def answer(self, run_id: str, approval: str, **answer: Any) -> None:
        await self.link.call("answer", id=run_id, approval=approval, answer=answer)


@pytest.fixture
async def box(bubblewrap: str, tmp_path: Path) -> AsyncIterator[Box]:
    (tmp_path / "workspace").mkdir()
    path = tmp_path / "link.sock"
    name = f"atoll-test-{os.urandom(8).hex()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    config = {
        "listen_fd": listener.fileno(), "root": str(tmp_path / "workspace"), "hooks": False,
        "inside": name,
    }  # fmt: skip
    boot = executor_bundle.BOOT.format(path=str(executor_bundle.write(tmp_path)))
    process = subprocess.Popen(  # noqa: ASYNC220 - a fixture, with nothing beside it
        [
            bubblewrap, "--unshare-pid", "--unshare-ipc", "--as-pid-1", "--die-with-parent",
            "--dev-bind", "/", "/",
            "--proc", "/proc", sys.executable, "-I", "-S", "-c", boot, json.dumps(config),
        ],
        pass_fds=[listener.fileno()],
    )  # fmt: skip
    listener.close()
    try:
        link = await Link.connect(str(path), LinkSettings(), timeout=timedelta(seconds=60))
        try:
            await link.call("release", zygote=link.hello["zygote"])
            yield Box(link, name, path)
        finally:
            link.close()
    finally:
        process.kill()
        process.wait()
    await link.closed


async def test_a_question_is_asked_and_answered(box: Box) -> None:
    output, running = await box.start("one", "print(a.ask('Go on?', {'n': [1]}))")
    assert await output.approval() == {
        "id": "1", "state": "asked", "question": "Go on?", "data": {"n": [1]}, "timeout": 300.0,
    }  # fmt: skip
    await box.answer("one", "1", approved=True, answer={"é": 1}, reason=None)
    assert await output.approval() == {
        "id": "1", "state": "answered", "approved": True, "answer": {"é": 1}, "reason": None,
    }  # fmt: skip
    assert (await running)["exit_code"] == 0
    assert output.text.decode() == "Answer(approved=True, answer={'é': 1}, reason=None)\n"


async def test_a_refusal_is_false_and_has_a_reason(box: Box) -> None:
    output, running = await box.start("one", "x = a.ask('?')\nprint(bool(x), x.answer, x.reason)")
    await output.approval()
    await box.answer("one", "1", approved=False, answer="never", reason="too dear")
    await running
    assert output.text == b"False never too dear\n"


async def test_an_unanswered_question_times_out(box: Box) -> None:
    code = "x = a.ask('?', timeout=0.05)\nprint(bool(x), x.reason)\nprint(a.ask('!').reason)"
    output, running = await box.start("one", code, approval_timeout=0.1)
    assert (await output.approval())["timeout"] == 0.05
    assert await output.approval() == {
        "id": "1", "state": "refused", "approved": False, "answer": None, "reason": "timeout",
    }  # fmt: skip
    assert (await output.approval())["timeout"] == 0.1
    await running
    assert output.text == b"False timeout\ntimeout\n"
    with pytest.raises(ExecutorError) as late:
        await box.answer("one", "1", approved=True)
    assert late.value.code == "not_running"


async def test_a_cancelled_execution_is_informed_during_its_grace_period(box: Box) -> None:
    code = (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "print(a.ask('?').reason, flush=True)\nprint(a.ask('again').reason, flush=True)\n"
        "print(a.messages(wait=20), flush=True)"
    )
    output, running = await box.start("one", code)
    await output.approval()
    await box.link.call("cancel", id="one", grace=10)
    assert (await output.approval())["reason"] == "cancelled"
    assert (await running)["reason"] == "cancelled"
    assert output.text == b"cancelled\ncancelled\n[]\n"


async def test_a_question_of_a_process_whose_execution_ends_is_refused(box: Box) -> None:
    code = "import os\nif os.fork() == 0: a.ask('?')\nelse: a.messages(wait=20)"
    output, running = await box.start("one", code)
    first = await output.approval()
    await box.tell("one")
    second = await output.approval()
    assert (first["state"], second["state"], second["reason"]) == ("asked", "refused", "ended")
    await running


async def test_a_question_is_withdrawn_when_its_process_exits(box: Box) -> None:
    code = (
        "import os\n"
        "child = os.fork()\n"
        "if child == 0: a.ask('?')\n"
        "a.messages(wait=20); os.kill(child, 9); os.waitpid(child, 0)\n"
        "print(a.ask('!').approved)"
    )
    output, running = await box.start("one", code)
    states = [await output.approval()]
    await box.tell("one")
    states += [await output.approval() for _ in range(2)]
    gone = next(entry for entry in states if entry["state"] == "refused")
    assert gone["reason"] == "gone"
    with pytest.raises(ExecutorError) as late:
        await box.answer("one", gone["id"], approved=True)
    assert late.value.code == "approval_gone"
    still = next(entry["id"] for entry in states if entry["id"] != gone["id"])
    await box.answer("one", still, approved=True)
    await running
    assert output.text == b"True\n"


async def test_concurrent_questions_each_get_their_own_answer(box: Box) -> None:
    code = (
        "import threading\n"
        "def one(n): print(n, a.ask(str(n)).answer)\n"
        "threads = [threading.Thread(target=one, args=(n,)) for n in range(5)]\n"
        "for t in threads: t.start()\n"
    )
    output, running = await box.start("one", code)
    for _ in range(5):
        entry = await output.approval()
        while entry["state"] != "asked":
            entry = await output.approval()
        await box.answer("one", entry["id"], approved=True, answer=f"to {entry['question']}")
    await running
    assert sorted(output.text.decode().splitlines()) == [f"{n} to {n}" for n in range(5)]


async def test_the_number_of_open_questions_is_limited(box: Box) -> None:
    code = (
        "import os\n"
        "for n in range(8):\n"
        "    if os.fork() == 0: a.ask(str(n)); os._exit(0)\n"
        "a.messages(wait=20)\n"
        "try: a.ask('one more')\n"
        "except a.Unavailable as error: print(error.code)"
    )
    output, running = await box.start("one", code)
    for _ in range(8):
        await output.approval()
    await box.tell("one")
    await running
    assert output.text == b"too_many_questions\n"


async def test_the_log_of_one_execution_does_not_grow_with_questions(box: Box) -> None:
    code = (
        "try:\n    while True: a.ask('x' * 60_000, timeout=0)\n"
        "except a.Unavailable as error: print(error.code)"
    )
    output, running = await box.start("one", code)
    await running
    assert output.text == b"too_many_questions\n"
    assert output.approvals.qsize() <= 2 * (limits.MAX_APPROVAL_BYTES // 60_000)


@pytest.mark.parametrize("size", [66_000, 200_000])
async def test_a_question_that_is_too_large_is_refused(box: Box, size: int) -> None:
    code = f"try: a.ask('x' * {size})\nexcept a.Unavailable as error: print(error.code)"
    assert await box.run("one", code) == "too_large\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        b"", b"[]", b"{}", b'{"op": 1}', b"\xff", b"[" * 60_000, b"null", b"NaN",
        b'{"op": "ask", "question": 1}', b'{"op": "ask", "question": "", "timeout": "nan"}',
        b'{"op": "messages", "wait": 1' + b"0" * 4000 + b"}",
        b'{"op": "messages", "wait": "nan"}',
    ],
    ids=lambda line: line[:60].decode("ascii", "replace"),
)  # fmt: skip
async def test_an_invalid_request_gets_an_error(box: Box, line: bytes) -> None:
    code = (
        "import socket\n"
        "peer = socket.socket(socket.AF_UNIX); peer.connect(a.ADDRESS)\n"
        f"peer.sendall(bytes.fromhex({line.hex()!r}) + b'\\n')\n"
        "print(peer.recv(1000))\nprint(a.messages())"
    )
    output = await box.run("one", code)
    assert '"error":"bad_request"' in output
    assert output.endswith("[]\n")


async def test_messages_are_read_in_order_once(box: Box) -> None:
    output, running = await box.start("one", "print(a.messages(wait=20))\nprint(a.messages())")
    await box.tell("one", "é\n1")
    assert await output.line() == "['é\\n1']"
    assert await output.line() == "[]"
    await running


async def test_messages_wait_until_they_are_read(box: Box) -> None:
    code = "import sys; sys.stdin.read(); print(a.ask('?').answer); print(len(a.messages()))"
    output, running = await box.start("one", code, stdin="")
    await output.approval()
    text = "x" * messages.MAX_MESSAGE
    for _ in range(20):
        await box.link.call("message", id="one", text=text)
    with pytest.raises(ExecutorError) as large:
        await box.link.call("message", id="one", text=text + "x")
    assert large.value.code == "too_large"
    await box.answer("one", "1", approved=True, answer=1)
    await running
    assert output.text == b"1\n20\n"


async def test_the_number_of_unread_messages_is_limited(box: Box) -> None:
    output, running = await box.start("one", "print(a.ask('?').answer); print(len(a.messages()))")
    await output.approval()
    for number in range(messages.MAX_MESSAGES):
        await box.link.call("message", id="one", text=str(number))
    with pytest.raises(ExecutorError) as full:
        await box.link.call("message", id="one", text="")
    assert full.value.code == "queue_full"
    await box.answer("one", "1", approved=True)
    await running
    assert output.text == b"None\n1000\n"


async def test_waiting_for_a_message_in_vain_returns_an_empty_list(box: Box) -> None:
    assert await box.run("one", "print(a.messages(wait=0.05))") == "[]\n"


async def test_messages_and_answers_to_an_unknown_run_are_refused(box: Box) -> None:
    for op, fields in (("message", {"text": "x"}), ("answer", {"approval": "1", "answer": {}})):
        with pytest.raises(ExecutorError) as unknown:
            await box.link.call(op, id="none", **fields)
        assert unknown.value.code == "unknown_run"
    await box.run("one", "pass")
    with pytest.raises(ExecutorError) as over:
        await box.link.call("message", id="one", text="x")
    assert over.value.code == "not_running"


async def test_a_background_process_belongs_to_no_execution(box: Box) -> None:
    os.mkfifo(box.path.parent / "said")
    code = (
        "import os, sys\n"
        "if os.fork() == 0:\n"
        "    while os.getppid() != 1: pass\n"
        "    try: a.ask('?')\n"
        "    except a.Unavailable as error: out = error.code\n"
        f"    open({str(box.path.parent / 'said')!r}, 'w').write(out)\n"
        "    os._exit(0)\n"
    )
    await box.run("one", code)
    output = await asyncio.to_thread((box.path.parent / "said").read_text)
    assert output == "no_execution"


async def test_a_flood_of_connections_does_not_affect_the_link(box: Box) -> None:
    code = (
        "import socket\n"
        "peers = []\n"
        "for n in range(200):\n"
        "    peer = socket.socket(socket.AF_UNIX); peer.connect(a.ADDRESS); peers.append(peer)\n"
        "print('there', flush=True)\n"
        "for peer in peers[-20:]: assert b'busy' in peer.recv(100)\n"
        "for peer in peers[:60]: peer.close()\n"
        "while True:\n"
        "    try: a.messages(wait=5)\n"
        "    except a.Unavailable: continue\n"
        "    break\n"
        "while True:\n"
        "    peer = socket.socket(socket.AF_UNIX); peer.connect(a.ADDRESS); peer.close()\n"
    )
    output, running = await box.start("one", code, timeout=120.0)
    assert await output.line() == "there"
    async with asyncio.timeout(30):
        await box.link.call("message", id="one", text="x")
        for _ in range(100):
            await box.link.call("processes")
    await box.link.call("cancel", id="one")
    assert (await running)["reason"] == "cancelled"
    assert "there" in await box.run("two", "print('there', a.messages())")


async def test_a_shutdown_refuses_open_questions(box: Box) -> None:
    output, running = await box.start("one", "a.ask('?')")
    await output.approval()
    await box.link.call("shutdown")
    assert (await output.approval())["reason"] == "shutdown"
    with contextlib.suppress(LinkLost):  # The link may be lost before the response arrives.
        await running


def test_outside_a_sandbox_every_call_fails_with_an_explanation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(atoll_session, "ADDRESS", f"\0nobody-{os.urandom(8).hex()}")
    for call in (lambda: atoll_session.ask("?"), atoll_session.messages, atoll_session.staging):
        with pytest.raises(atoll_session.Unavailable, match="not an Atoll sandbox"):
            call()
    with pytest.raises(atoll_session.Unavailable, match="not an Atoll sandbox"):
        atoll_session.execution_id  # noqa: B018
