"""Contexts through the SDK and the command line."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import AsyncAtoll, Atoll, Conflict, Display, NotFound, Session
from tests.e2e.api import eventually
from tests.harness import Server

pytestmark = [pytest.mark.anyio, pytest.mark.quick]
SVG = "class S:\n    def _repr_svg_(self): return '<svg/>'\n"


@pytest.fixture
def session(server: Server) -> Iterator[Session]:
    with Atoll(server.url, api_key=server.key) as atoll, atoll.session() as session:
        yield session


def test_a_context_keeps_variables_and_returns_displays(session: Session, tmp_path: Path) -> None:
    with session.context() as context:
        assert context.run("x = 6").results == ()
        result = context.run("display(x)\nx * 7")
        assert [(shown.type, shown.text) for shown in result.results] == [
            ("display", "6"), ("result", "42"),
        ]  # fmt: skip
        assert context.run(f"{SVG}S()").results[0].save(tmp_path / "s").read_text() == "<svg/>"
        error = context.run("x / 0").error
        assert error is not None
        assert (error.name, error.message) == ("ZeroDivisionError", "division by zero")
        assert context.refresh().execution_count == 4
        assert [found.id for found in session.contexts()] == [context.id]
        assert session.get_context(context.id).run("x").results[0].text == "6"
    assert list(session.contexts()) == []
    with pytest.raises(NotFound) as caught:
        session.get_context(context.id)
    assert caught.value.code == "context_not_found"


def test_callbacks_receive_displays_as_they_arrive(session: Session) -> None:
    shown: list[Display] = []
    printed: list[str] = []
    with session.context() as context:
        result = context.run(
            "print('a')\ndisplay(1)\n2", on_result=shown.append, on_stdout=printed.append
        )
    assert [item.text for item in shown] == ["1", "2"]
    assert result.results == tuple(shown)
    assert "".join(printed) == "a\n"


def test_a_question_of_a_context_is_answered_by_a_callback(session: Session) -> None:
    kinds: list[str] = []
    with session.context() as context:
        result = context.run(
            "from atoll_session import ask\nbool(ask('Go on?'))",
            on_approval=lambda approval: approval.question == "Go on?",
            on_event=lambda event: kinds.append(event.kind),
            execution_id="asked-in-a-context",
        )
    assert (result.results[0].text, result.execution_id) == ("True", "asked-in-a-context")
    assert kinds.count("approval") == 2


def test_an_interrupt_from_another_thread_keeps_the_variables(session: Session) -> None:
    def interrupt() -> None:
        eventually(lambda: "began" in [entry.name for entry in session.files.list()])
        context.interrupt()

    with session.context() as context:
        context.run("x = 1")
        thread = threading.Thread(target=interrupt)
        thread.start()
        result = context.run("open('began', 'w').close()\nimport time; time.sleep(60)")
        thread.join()
        assert result.error is not None
        assert result.error.name == "KeyboardInterrupt"
        assert context.run("x").results[0].text == "1"


def test_a_dead_context_is_restarted(session: Session) -> None:
    with session.context() as context:
        context.run("import os; os._exit(1)")
        with pytest.raises(Conflict) as caught:
            context.run("1")
        assert caught.value.code == "context_dead"
        assert context.restart().state == "idle"
        assert context.run("1").results[0].text == "1"


async def test_the_asynchronous_client_has_contexts_too(server: Server) -> None:
    async with (
        AsyncAtoll(server.url, api_key=server.key) as atoll,
        atoll.session() as session,
        await session.context(cwd="/tmp") as context,
    ):
        assert context.info.cwd == "/tmp"
        execution = await context.submit("import os\nos.getcwd()")
        assert (await execution.wait()).results[0].text == "'/tmp'"
        assert [found.id async for found in session.contexts()] == [context.id]


def test_the_command_line_manages_contexts(
    session: Session, server: Server, tmp_path: Path
) -> None:
    def atoll(*arguments: str, code: int = 0, given: str = "") -> str:
        done = server.atoll("context", *arguments, input=given)
        assert done.returncode == code, done.stderr
        return done.stdout.strip()

    context = atoll("create", session.id)
    assert atoll("run", session.id, context, "-c", "x = 5\nprint('hi')") == "hi"
    assert atoll("run", session.id, context, given="x + 1") == "6"
    assert atoll("run", session.id, context, "-c", "1/0", code=1) == ""
    saved = tmp_path / "shown"
    atoll("run", session.id, context, "-c", f"{SVG}S()", "--save", str(saved))
    assert (saved / "1.svg").read_text() == "<svg/>"
    (listed,) = json.loads(atoll("list", session.id, "--json"))
    assert (listed["id"], listed["state"], listed["execution_count"]) == (context, "idle", 4)
    assert context in atoll("list", session.id)
    assert atoll("interrupt", session.id, context) == context
    assert atoll("restart", session.id, context) == context
    assert atoll("delete", session.id, context) == context
    assert json.loads(atoll("list", session.id, "--json")) == []


async def test_a_context_can_be_used_with_and_without_a_block(server: Server) -> None:
    async with AsyncAtoll(server.url, api_key=server.key) as atoll, atoll.session() as session:
        async with session.context() as context:
            assert (await context.run("1")).results[0].text == "1"
        async with await session.context() as context:
            assert (await context.run("2")).results[0].text == "2"
        context = await session.context()
        await context.delete()
        assert [found async for found in session.contexts()] == []


def test_a_context_left_open_causes_a_warning(session: Session) -> None:
    def leave_open() -> None:
        session.context()
        gc.collect()

    with pytest.warns(ResourceWarning, match=r"<Context .* was not closed"):
        leave_open()


def test_a_key_names_one_run_with_and_without_callbacks(session: Session) -> None:
    with session.context() as context:
        context.run("n = 0")
        first = context.run("n += 1\nn", idempotency_key=context.id)
        again = context.run("n += 1\nn", on_result=lambda shown: None, idempotency_key=context.id)
        assert first.results[0].text == again.results[0].text == "1"
