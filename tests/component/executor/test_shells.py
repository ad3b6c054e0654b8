"""The shells of a context, in separate processes because they change the interpreter."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.missing import missing

DRIVER = """
import json, sys
_, kind, cells = sys.argv
if kind == "plain":
    sys.modules["IPython"] = None  # As if it were not there.
from atoll.executor.interpreter import matplotlib_figures, shell
from tests.missing import missing
class Kernel:
    shown = []
    def show(self, kind, data, metadata=None):
        self.shown.append([kind, {k: str(v) for k, v in data.items()}])
kernel = Kernel()
found = shell.make(kernel)
matplotlib_figures.prepare(kernel)
told = []
for code in json.loads(cells):
    error = found.run(code)
    kernel.shown.append(["error", None if error is None else type(error).__name__])
    if error is not None:
        told.append(found.traceback(error))
sys.__stdout__.write("\\n" + json.dumps([type(found).__name__, kernel.shown, told]))
"""


@pytest.fixture(params=["ipython", "plain"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "ipython" and importlib.util.find_spec("IPython") is None:
        missing("IPython is not installed")
    return str(request.param)


def run(kind: str, *cells: str) -> tuple[list[list[Any]], list[str], str]:
    """What was shown, the tracebacks, and what was printed."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, kind, json.dumps(cells)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    printed, _, last = done.stdout.rpartition("\n")
    name, shown, traceback_text = json.loads(last)
    assert name == {"ipython": "IPythonShell", "plain": "PlainShell"}[kind]
    return shown, traceback_text, printed


def test_names_persist_and_the_last_expression_is_shown(kind: str) -> None:
    shown, _, _ = run(kind, "x = 20", "x + 1\nx + 2", "x;", "None")
    assert [item for item in shown if item[0] == "result"] == [["result", {"text/plain": "22"}]]


def test_a_traceback_starts_at_the_first_cell(kind: str) -> None:
    shown, tracebacks, _ = run(
        kind, "def f():\n    1/0", "x = 1\n\nf()", "f(", "from __future__ import nope"
    )
    names = [item[1] for item in shown]
    assert names == [None, "ZeroDivisionError", "SyntaxError", "SyntaxError"]
    assert tracebacks[0].splitlines()[1:3] == ['  File "<cell 2>", line 3, in <module>', "    f()"]
    assert '  File "<cell 1>", line 2, in f' in tracebacks[0]
    assert all("atoll" not in text and "\x1b" not in text for text in tracebacks)


def test_an_exit_is_an_error_without_a_traceback(kind: str) -> None:
    shown, tracebacks, _ = run(kind, "exit()", "quit(2)", "import sys; sys.exit(3)")
    assert shown == [["error", "SystemExit"]] * 3
    assert tracebacks == [""] * 3


def test_display_accepts_a_bundle(kind: str) -> None:
    shown, _, _ = run(kind, "display(1, 'a')\ndisplay({'text/html': '<b>'}, raw=True)")
    assert shown[:-1] == [
        ["display", {"text/plain": "1"}],
        ["display", {"text/plain": "'a'"}],
        ["display", {"text/html": "<b>"}],
    ]


def test_code_can_await_and_an_interrupted_wait_has_ended(kind: str) -> None:
    shown, _, printed = run(
        kind,
        "import asyncio, signal, os\nasync def f(): return 5",
        "await f()",
        "asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)\n"
        "await asyncio.sleep(30)\nprint('went on')",
        "await asyncio.sleep(0)\nprint('again')",
    )
    assert ["result", {"text/plain": "5"}] in shown
    assert [item[1] for item in shown if item[0] == "error"][2:] == ["KeyboardInterrupt", None]
    assert printed.split() == ["again"]


def test_a_future_statement_applies_to_later_cells(kind: str) -> None:
    shown, _, _ = run(
        kind, "from __future__ import annotations", "def f(a: nope): pass\nf.__annotations__"
    )
    assert shown[-2] == ["result", {"text/plain": "{'a': 'nope'}"}]


def test_classes_of_a_cell_can_be_pickled(kind: str) -> None:
    shown, _, _ = run(
        kind, "import pickle\nclass A: pass", "type(pickle.loads(pickle.dumps(A()))) is A"
    )
    assert shown[-2] == ["result", {"text/plain": "True"}]


def test_a_failing_representation_does_not_affect_the_others(kind: str) -> None:
    shown, _, _ = run(
        kind,
        "class A:\n    def _repr_html_(self): 1/0\n    def _repr_latex_(self): return '$a$'\n"
        "    def __repr__(self): return 'a'\nA()",
    )
    assert shown == [["result", {"text/plain": "a", "text/latex": "$a$"}], ["error", None]]
