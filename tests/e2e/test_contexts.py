"""Contexts: code that finds what the code before it left behind, and what it shows."""

from __future__ import annotations

import base64
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import drivers
from tests.e2e.api import V1, Api, answer, eventually, problem, until
from tests.harness import Server
from tests.interpreters import own_interpreter

pytestmark = pytest.mark.quick

SHELLS: dict[str, dict[str, Any]] = {
    "ipython": {"template_id": "science"},
    "plain": {"template_id": "science", "env_vars": {"ATOLL_NO_IPYTHON": "1"}},
}
if drivers.CHOSEN != "local":
    # The image has no more than Python.
    SHELLS = {"plain": {}}
PNG = b"\x89PNG"


class Context:
    """One context of a session, through the API."""

    def __init__(self, api: Api, session: str, **fields: Any) -> None:
        self.api = api
        self.session = session
        self.path = f"{V1}/sessions/{session}/contexts"
        self.made = answer(api.http.post(self.path, json=fields), 201)
        self.id = str(self.made["id"])

    def run(self, code: str, **fields: Any) -> dict[str, Any]:
        return self.api.run(self.session, code, context_id=self.id, **fields)

    def ok(self, code: str, **fields: Any) -> dict[str, Any]:
        result = self.run(code, **fields)
        assert result["status"] == "success", result
        return result

    def value(self, code: str) -> str:
        """The last expression's value, as text."""
        (shown,) = self.ok(code)["results"]
        assert shown["type"] == "result"
        return str(shown["data"]["text/plain"])

    def submit(self, code: str, **fields: Any) -> str:
        return self.api.submit(self.session, code, context_id=self.id, **fields)

    def post(self, verb: str) -> dict[str, Any]:
        return answer(self.api.http.post(f"{self.path}/{self.id}/{verb}"))

    def look(self) -> dict[str, Any]:
        return answer(self.api.http.get(f"{self.path}/{self.id}"))

    def delete(self) -> None:
        assert self.api.http.delete(f"{self.path}/{self.id}").status_code == 204


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contexts")


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    with own_interpreter() as path:
        yield path


@pytest.fixture(scope="module")
def api(bubblewrap: str, directory: Path, python: Path) -> Iterator[Api]:
    """With a template that has the packages that the tests themselves have."""
    env = {
        "ATOLL_LOCAL__TEMPLATE_ROOTS": f"{python.parent.parent}:{sys.base_prefix}",
        "ATOLL_POOL__SIZE": "0",
    }
    with Server(directory, **env) as server, server.client() as http:
        body = {"id": "science", "name": "Science", "python": str(python), "pool_size": 1}
        if drivers.CHOSEN == "local":
            answer(http.post(f"{V1}/templates", json=body), 201)
        yield Api(http)


@pytest.fixture(params=list(SHELLS))
def shell(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def context(api: Api, shell: str) -> Iterator[Context]:
    session = str(api.create(**SHELLS[shell])["id"])
    yield Context(api, session)
    api.end(session)


@pytest.fixture
def plain(api: Api) -> Iterator[Context]:
    session = str(api.create(**SHELLS["plain"])["id"])
    yield Context(api, session)
    api.end(session)


# State


def test_state_of_a_context_persists_between_executions(context: Context) -> None:
    context.ok("import os\nx = 41\ndef f(n): return n + 1\nos.mkdir('d'); os.chdir('d')\n")
    context.ok("file = open('log', 'w'); file.write('kept')\nimport sys; sys.marked = True")
    assert context.value("f(x)") == "42"
    assert context.value("file.close(); open('log').read()") == "'kept'"
    assert context.value("os.getcwd()") == "'/workspace/d'"
    assert context.value("sys.marked") == "True"


def test_a_context_reports_its_fields(api: Api, session: str) -> None:
    api.put(session, "sub/file")
    context = Context(api, session, language="python", cwd="sub")
    shown = context.look()
    assert shown == context.made
    assert shown["state"] == "idle"
    assert (shown["session_id"], shown["language"]) == (session, "python")
    assert (shown["cwd"], shown["execution_count"]) == ("/workspace/sub", 0)
    assert context.value("__import__('os').listdir()") == "['file']"
    assert context.look()["execution_count"] == 1
    assert answer(api.http.get(context.path))["items"] == [context.look()]


def test_contexts_are_separate_from_each_other_and_from_plain_executions(context: Context) -> None:
    other = Context(context.api, context.session)
    context.ok("x = 1")
    other.ok("x = 2")
    assert (context.value("x"), other.value("x")) == ("1", "2")
    assert context.api.run(context.session, "print(x)")["error"]["name"] == "NameError"


@pytest.mark.every_driver
def test_stdin_and_environment_belong_to_the_execution(context: Context) -> None:
    result = context.ok(
        "import os\nprint(input(), os.environ['WHO'])", stdin="a\nb\n", env={"WHO": "me"}
    )
    assert result["stdout"] == "a me\n"
    assert context.ok("print(input())", stdin="c\n")["stdout"] == "c\n"
    assert context.value("os.environ.get('WHO')  is None") == "True"
    assert context.run("input()")["error"]["name"] == "EOFError"


def test_code_may_await(context: Context) -> None:
    assert context.value("import asyncio\nawait asyncio.sleep(0, 'woke')") == "'woke'"


def test_exit_ends_the_execution_but_not_the_context(context: Context) -> None:
    context.ok("x = 5")
    for code in ("exit(3)", "import sys; sys.exit(3)", "raise SystemExit(3)"):
        result = context.run(code)
        assert (result["status"], result["exit_code"]) == ("failed", 3)
    assert context.value("x") == "5"


# Displays and results


def test_the_last_expression_and_displays_are_returned_in_order(context: Context) -> None:
    result = context.ok("print('out'); display('a', 2); 'b' + 'c'")
    assert [(shown["type"], shown["data"]["text/plain"]) for shown in result["results"]] == [
        ("display", "'a'"), ("display", "2"), ("result", "'bc'"),
    ]  # fmt: skip
    assert result["stdout"] == "out\n"
    for silent in ("x = 1", "None", "1;", ""):
        assert context.ok(silent)["results"] == []
    assert context.value("1; 2") == "2"


def test_every_representation_of_a_value_is_returned(context: Context) -> None:
    shown = context.ok("""
class Rich:
    def __repr__(self): return "plain"
    def _repr_html_(self): return "<b>html</b>"
    def _repr_markdown_(self): return "*md*"
    def _repr_latex_(self): return "$x$"
    def _repr_svg_(self): return "<svg/>"
    def _repr_png_(self): return b"png bytes"
    def _repr_jpeg_(self): return b"jpeg", {"width": 3}
    def _repr_json_(self): return {"a": [1]}
Rich()
""")["results"][0]
    assert shown["data"] == {
        "text/plain": "plain",
        "text/html": "<b>html</b>",
        "text/markdown": "*md*",
        "text/latex": "$x$",
        "image/svg+xml": "<svg/>",
        "image/png": base64.b64encode(b"png bytes").decode(),
        "image/jpeg": base64.b64encode(b"jpeg").decode(),
        "application/json": {"a": [1]},
    }
    assert shown["metadata"]["image/jpeg"] == {"width": 3}


def test_a_custom_mime_bundle_is_returned_unchanged(context: Context) -> None:
    results = context.ok(
        "class Own:\n"
        "    def _repr_mimebundle_(self, include=None, exclude=None):\n"
        "        return {'application/x-own+json': {'n': 1}, 'text/plain': 'own'}\n"
        "display(Own())\ndisplay({'text/plain': 'raw', 'text/html': '<i>'}, raw=True)"
    )["results"]
    assert [shown["data"] for shown in results] == [
        {"application/x-own+json": {"n": 1}, "text/plain": "own"},
        {"text/plain": "raw", "text/html": "<i>"},
    ]


def test_figures_are_shown_once_at_the_end_or_by_show(context: Context) -> None:
    context.ok("import matplotlib.pyplot as plt", timeout=60, wait=60)
    for code in (
        "plt.plot([1, 2, 3]);",
        "plt.plot([1, 2, 3]); plt.show()",
        "fig, _ = plt.subplots(); fig",
        "fig, _ = plt.subplots(); display(fig)",
    ):
        results = context.ok(code, timeout=60, wait=60)["results"]
        images = [shown["data"] for shown in results if "image/png" in shown["data"]]
        assert len(images) == 1, code
        assert base64.b64decode(images[0]["image/png"]).startswith(PNG)
        assert images[0]["text/plain"].startswith("<Figure size")
    assert context.value("plt.get_fignums()") == "[]"


def test_drawing_prints_nothing_and_leaves_only_the_figure(api: Api) -> None:
    session = str(api.create(**SHELLS["ipython"])["id"])
    code = (
        "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.savefig('figure.png')\nplt.close()"
    )
    for context in ({}, {"context_id": Context(api, session).id}):
        result = api.run(session, code, timeout=60, wait=60, **context)
        # Output if it takes longer than five seconds.
        received = [line for line in result["stderr"].splitlines() if "font cache" not in line]
        assert (result["exit_code"], received) == (0, [])
        assert result["artifacts"] == ["figure.png"]
    assert api.names(session) == ["figure.png"]
    api.end(session)


def test_a_pandas_table_is_returned_as_html_and_text(context: Context) -> None:
    (shown,) = context.ok("import pandas\npandas.DataFrame({'a': [1, 2]})", timeout=60, wait=60)[
        "results"
    ]
    assert "<table" in shown["data"]["text/html"]
    assert shown["data"]["text/plain"].split() == ["a", "0", "1", "1", "2"]


@pytest.mark.every_driver
def test_results_are_stored_with_the_record_and_sent_as_events(context: Context) -> None:
    execution = context.submit("print('first')\ndisplay('x' * 200_000)\nprint('then')\n7")
    result = context.api.result(execution)
    assert [len(s["data"]["text/plain"]) for s in result["results"]] == [200_002, 1]
    assert context.api.execution(execution)["results"] == result["results"]
    events = [(name, content) for _, name, content in context.api.events(execution)]
    assert [content for name, content in events if name == "display"] == result["results"]
    order = [name for name, _ in events if name in ("stdout", "display")]
    assert order[0] == "stdout"


def test_magics_and_shell_commands_work_with_ipython(api: Api) -> None:
    session = str(api.create(**SHELLS["ipython"])["id"])
    context = Context(api, session)
    assert context.ok("!echo hey")["stdout"] == "hey\n"
    assert "loop" in context.ok("%timeit -n1 -r1 pass")["stdout"]
    assert "number of items" in context.ok("len?")["results"][0]["data"]["text/plain"]
    failed = context.run("%no_such_magic")
    assert failed["error"]["name"] == "UsageError"
    assert "\x1b" not in context.run("1/0")["stderr"]
    assert "this sandbox has no network" in context.run("%pip install no-such")["stdout"]
    files = context.value("import os, glob\nsorted(glob.glob(os.environ['HOME'] + '/.ipy*'))")
    assert files == "[]"
    api.end(session)


# Errors


def test_an_error_has_a_name_a_value_and_a_traceback(context: Context) -> None:
    context.ok("def f():\n    raise ValueError('no good')")
    result = context.run("f()")
    assert (result["status"], result["exit_code"]) == ("failed", 1)
    error = result["error"]
    assert (error["code"], error["name"], error["message"]) == (
        "exception", "ValueError", "no good",
    )  # fmt: skip
    assert error["traceback"].splitlines() == [
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 1, in <module>',
        "    f()",
        '  File "<cell 1>", line 2, in f',
        "    raise ValueError('no good')",
        "ValueError: no good",
    ]
    assert result["stderr"] == error["traceback"]
    wrong = context.run("x =")["error"]
    assert (wrong["name"], "<cell 3>" in wrong["traceback"]) == ("SyntaxError", True)


# Interrupts, time-outs, ends


def test_an_interrupt_keeps_the_state(context: Context) -> None:
    context.ok("x = 1")
    for code in (
        "while True: pass",
        "import time; time.sleep(60)",
        "import os; os.system('sleep 60')",
    ):
        execution = context.submit(f"open('began', 'w').close()\n{code}\nprint('went on')")
        eventually(lambda: "began" in context.api.names(context.session))
        eventually(lambda: context.look()["state"] == "busy")
        context.post("interrupt")
        result = context.api.result(execution)
        if "system" not in code:
            assert (result["status"], result["exit_code"]) == ("failed", 130)
            assert result["error"]["name"] == "KeyboardInterrupt"
        context.ok("__import__('os').remove('began')")
    assert context.value("x") == "1"
    assert context.post("interrupt")["state"] == "idle"
    assert context.value("x") == "1"


def test_a_timeout_interrupts_and_keeps_the_state(context: Context) -> None:
    context.ok("x = 1")
    result = context.run("x = 2\nimport time; time.sleep(60)", timeout=2)
    assert (result["status"], result["cause"]) == ("timeout", "timeout")
    assert context.look()["state"] == "idle"
    assert context.value("x") == "2"


STUBBORN = """
import time
while True:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print('never')
"""


@pytest.mark.slow
def test_code_that_ignores_the_interrupt_is_ended_with_its_context(context: Context) -> None:
    context.ok("1")
    result = context.run(STUBBORN, timeout=2)
    assert (result["status"], result["stdout"]) == ("timeout", "never\n")
    assert context.look()["state"] == "dead"
    refused = context.api.execute(context.session, code="1", context_id=context.id)
    problem(refused, 409, "context_dead")
    assert context.post("restart")["state"] == "idle"
    assert context.value("1") == "1"


def test_a_cancellation_interrupts_too(context: Context) -> None:
    context.ok("x = 1")
    execution = context.submit("open('began', 'w').close()\nimport time; time.sleep(60)")
    eventually(lambda: "began" in context.api.names(context.session))
    answer(context.api.http.post(f"{V1}/executions/{execution}/cancel"))
    assert context.api.status(execution) == "cancelled"
    assert context.value("x") == "1"


def test_a_restart_clears_the_state_and_cancels_the_running_execution(context: Context) -> None:
    context.ok("x = 1")
    execution = context.submit("open('began', 'w').close()\nimport time; time.sleep(60)")
    eventually(lambda: "began" in context.api.names(context.session))
    shown = context.post("restart")
    assert (shown["id"], shown["state"], shown["execution_count"]) == (context.id, "idle", 0)
    assert context.api.result(execution)["status"] == "error"
    assert context.api.status(execution) == "cancelled"
    assert context.value("'x' in globals()") == "False"


@pytest.mark.every_driver
def test_a_deleted_context_cancels_its_execution_and_is_not_found(context: Context) -> None:
    execution = context.submit("open('began', 'w').close()\nimport time; time.sleep(60)")
    eventually(lambda: "began" in context.api.names(context.session))
    context.delete()
    assert context.api.result(execution)["status"] == "error"
    http, path = context.api.http, f"{context.path}/{context.id}"
    problem(http.delete(path), 404, "context_not_found")
    problem(http.get(path), 404, "context_not_found")
    problem(http.post(f"{path}/restart"), 404, "context_not_found")
    problem(http.post(f"{path}/interrupt"), 404, "context_not_found")
    refused = context.api.execute(context.session, code="1", context_id=context.id)
    problem(refused, 404, "context_not_found")
    assert answer(http.get(context.path))["items"] == []


@pytest.mark.parametrize(
    ("code", "exit_code", "signal"),
    [("import os; os._exit(4)", 4, None), ("import os; os.kill(os.getpid(), 11)", 139, "SIGSEGV")],
    ids=["exit", "crash"],
)
def test_a_context_process_that_exits_ends_its_execution(
    plain: Context, code: str, exit_code: int, signal: str | None
) -> None:
    result = plain.run(f"import sys; print('said', flush=True)\n{code}")
    assert (result["status"], result["exit_code"], result["signal"]) == (
        "failed", exit_code, signal,
    )  # fmt: skip
    assert result["stdout"] == "said\n"
    assert plain.look()["state"] == "dead"
    plain.post("restart")
    assert plain.value("1") == "1"


def test_a_context_survives_the_zygote(plain: Context) -> None:
    plain.ok("x = 1")
    killed = plain.api.run(
        plain.session,
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nimport time; time.sleep(60)",
    )
    assert killed["status"] != "success"
    assert plain.value("x") == "1"
    assert plain.api.run(plain.session, "print(1)")["stdout"] == "1\n"
    plain.run("import os; os._exit(0)")
    assert plain.look()["state"] == "dead"
    plain.post("restart")
    assert plain.value("2") == "2"


def test_a_context_ends_with_its_instance(plain: Context, directory: Path) -> None:
    instance = plain.api.get(plain.session)["container_id"]
    os.kill(drivers.handle(directory, instance)["child"], signal.SIGKILL)
    eventually(lambda: plain.api.http.get(f"{plain.path}/{plain.id}").status_code == 404)
    # Reading brought nothing back; the next piece of work does.
    assert plain.api.get(plain.session)["container_id"] == instance
    assert Context(plain.api, plain.session).value("1") == "1"
    assert plain.api.get(plain.session)["container_id"] != instance
    refused = plain.api.execute(plain.session, code="1", context_id=plain.id)
    problem(refused, 404, "context_not_found")


# Refusals


def test_a_context_that_is_not_supported_is_refused(api: Api, session: str) -> None:
    path = f"{V1}/sessions/{session}/contexts"
    for language in ("javascript", "shell", "cobol"):
        refused = api.http.post(path, json={"language": language})
        problem(refused, 422, "language_unsupported")
    problem(api.http.post(path, json={"cwd": "no/such"}), 422, "bad_cwd")
    problem(api.http.post(path, json={"colour": 1}), 422, "invalid_request")
    assert answer(api.http.get(path))["items"] == []
    context = Context(api, session)
    for more, code in (
        ({"code": "1", "language": "shell"}, "language_unsupported"),
        ({"command": ["ls"]}, "invalid_request"),
        ({"code": "1", "cwd": "/tmp"}, "invalid_request"),
        ({"code": "1", "args": ["a"]}, "invalid_request"),
    ):
        problem(api.execute(session, context_id=context.id, **more), 422, code)
    problem(api.execute(session, code="1", context_id="ctx_nope"), 404, "context_not_found")
    problem(api.http.get(f"{V1}/sessions/sess_nope/contexts"), 404, "session_not_found")


def test_the_number_of_contexts_of_a_session_is_limited(plain: Context) -> None:
    api, path = plain.api, plain.path
    contexts = [plain, *(Context(api, plain.session) for _ in range(15))]
    problem(api.http.post(path, json={}), 409, "too_many_contexts")
    contexts[0].delete()
    assert answer(api.http.post(path, json={}), 201)["state"] == "idle"
    assert contexts[15].value("1") == "1"


def test_a_context_runs_one_execution_at_a_time(api: Api) -> None:
    session = str(api.create(capacity=2, **SHELLS["plain"])["id"])
    context = Context(api, session)
    first = context.submit(until("go"))
    eventually(lambda: context.look()["state"] == "busy")
    problem(api.execute(session, code="1", context_id=context.id), 409, "context_busy")
    assert api.run(session, "print('beside')")["stdout"] == "beside\n"
    api.put(session, "go")
    assert api.result(first)["status"] == "success"
    assert context.value("1") == "1"
    api.end(session)


def test_executions_in_contexts_are_queued_at_a_capacity_of_one(plain: Context) -> None:
    first = plain.submit(until("go") + "x = 1")
    second = plain.submit("print(x)")
    plain.api.put(plain.session, "go")
    assert plain.api.result(first)["status"] == "success"
    assert plain.api.result(second)["stdout"] == "1\n"


def test_a_request_repeated_with_its_key_creates_one_context(api: Api, session: str) -> None:
    path, headers = f"{V1}/sessions/{session}/contexts", {"Idempotency-Key": f"one-{session}"}
    made: list[Any] = []

    def create() -> None:
        made.append(answer(api.http.post(path, json={}, headers=headers), 201)["id"])

    create()
    threads = [threading.Thread(target=create) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert len(set(made)) == 1
    assert len(answer(api.http.get(path))["items"]) == 1


def test_code_in_a_context_stages_files_and_receives_messages(plain: Context) -> None:
    result = plain.ok(
        "import os, pathlib\npathlib.Path(os.environ['ATOLL_STAGING'], 'made').write_text('x');\n"
        "os.environ['ATOLL_EXECUTION_ID']"
    )
    assert result["results"][0]["data"]["text/plain"] == repr(result["execution_id"])
    assert "made" in result["artifacts"]
    assert plain.value("'ATOLL_EXECUTION_ID' in os.environ") == "True"
    execution = plain.submit(
        "import atoll_session, time\nopen('began', 'w').close()\n"
        "while not (heard := atoll_session.messages()): time.sleep(0.01)\nheard"
    )
    eventually(lambda: "began" in plain.api.names(plain.session))
    body = {"message": "hello"}
    inject = plain.api.http.post(f"{V1}/executions/{execution}/inject", json=body)
    assert inject.status_code < 300, inject.text
    shown = plain.api.result(execution)["results"][0]
    assert "hello" in shown["data"]["text/plain"]
