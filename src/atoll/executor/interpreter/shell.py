"""
Runs the code of a context: with IPython if the interpreter has it, otherwise with `PlainShell`.

Both return the exception that the code raised, show the value of its last expression, and provide
`display`.
"""

from __future__ import annotations

import builtins
import linecache
import os
import sys
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any, Callable

    from .kernel import Kernel

CELL = "<cell %d>"
WITHOUT_IPYTHON = "ATOLL_NO_IPYTHON"
"""Variable that keeps a context from using IPython."""
AWAITS = 0x80  # CO_COROUTINE
METHODS = (
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("text/latex", "_repr_latex_"),
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("image/jpeg", "_repr_jpeg_"),
    ("application/json", "_repr_json_"),
    ("application/javascript", "_repr_javascript_"),
)


def make(kernel: Kernel) -> Any:
    if not os.environ.get(WITHOUT_IPYTHON):
        try:
            from . import ipython

            return ipython.make(kernel)
        except Exception as error:  # noqa: BLE001 - it is missing, or of an unknown version
            if not isinstance(error, ImportError):
                traceback.print_exc()
    return PlainShell(kernel)


def format_error(error: BaseException) -> str:
    """The traceback from the first cell on, as Python prints it; also written to stderr."""
    name = type.__dict__["__name__"].__get__(type(error))
    lines = ""
    try:
        trace = error.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
            trace = trace.tb_next
        lines = "".join(traceback.format_exception(type(error), error, trace))
    except Exception:  # noqa: BLE001 - __str__ is user code
        lines = "%s\n" % name
    try:
        sys.stderr.write(lines)
    except Exception:  # noqa: BLE001 - it may be user code
        pass
    return lines


class Exit:
    """`exit` and `quit`: they end the run and not the context."""

    def __repr__(self) -> str:
        return "Use exit(). It ends the run, not the context."

    def __call__(self, code: Any = None) -> None:
        raise SystemExit(code)


class PlainShell:
    """Plain Python: the value of a cell's last expression is shown and is stored in `_`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._count = 0
        self._flags = 0
        self._loop: Any = None
        self._traceback = ""
        main = type(sys)("__main__")
        main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = main
        self.names = main.__dict__
        sys.argv = [""]
        for name, value in (("display", self.display), ("exit", Exit()), ("quit", Exit())):
            setattr(builtins, name, value)

    def run(self, code: str) -> BaseException | None:
        """Run a cell; returns what it raised, after writing the traceback to stderr."""
        try:
            self._run(code)
        except SystemExit as error:
            return error
        except BaseException as error:  # noqa: BLE001 - whatever user code raises is its result
            self._traceback = format_error(error)
            return error
        return None

    def traceback(self, error: BaseException) -> str:
        """The traceback that was written for this exception."""
        return self._traceback

    def _run(self, source: str) -> None:
        import ast

        self._count += 1
        name = CELL % self._count
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        flags = self._flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        tree: Any = compile(source, name, "exec", flags | ast.PyCF_ONLY_AST, True)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        self._execute(self._compile(tree, name, "exec", flags))
        if last is not None:
            value = self._execute(self._compile(last, name, "eval", flags))
            if value is not None and not source.rstrip().endswith(";"):
                builtins._ = value  # type: ignore[attr-defined]
                self._kernel.show("result", *bundle(value))

    def _compile(self, tree: Any, name: str, mode: str, flags: int) -> CodeType:
        import __future__

        code: CodeType = compile(tree, name, mode, flags, True)
        for feature in __future__.all_feature_names:
            self._flags |= code.co_flags & getattr(__future__, feature).compiler_flag
        return code

    def _execute(self, code: CodeType) -> Any:
        value = eval(code, self.names)  # noqa: S307
        if not code.co_flags & AWAITS:
            return value
        import asyncio

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        task = self._loop.create_task(value)
        try:
            return self._loop.run_until_complete(task)
        finally:
            if not task.done():
                task.cancel()
                self._loop.run_until_complete(asyncio.wait([task]))

    def display(self, *objects: Any, raw: bool = False, metadata: Any = None, **_: Any) -> None:
        """Show objects in all their forms; with `raw`, MIME bundles unchanged."""
        for shown in objects:
            data, known = (shown, {}) if raw else bundle(shown)
            self._kernel.show("display", data, metadata or known)


def bundle(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The forms of a value by MIME type, and their metadata."""
    from . import matplotlib_figures

    data: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    if matplotlib_figures.is_figure(value):
        data["image/png"] = matplotlib_figures.png(value)
    if not isinstance(value, type):
        mixed = _form(value, "_repr_mimebundle_", include=None, exclude=None)
        parts = mixed if isinstance(mixed, tuple) and len(mixed) == 2 else (mixed, None)
        for target, found in zip((data, metadata), parts):
            if isinstance(found, dict):
                target.update(found)
        for mime, method in METHODS:
            form = None if mime in data else _form(value, method)
            if isinstance(form, tuple) and len(form) == 2:
                form, metadata[mime] = form
            if form is not None:
                data[mime] = form
    if "text/plain" not in data:
        text = _guarded(lambda: repr(value))
        data["text/plain"] = text if text is not None else object.__repr__(value)
    return data, metadata


def _form(value: Any, name: str, **arguments: Any) -> Any:
    method = getattr(type(value), name, None)
    return None if method is None else _guarded(lambda: method(value, **arguments))


def _guarded(call: Callable[[], Any]) -> Any:
    """Call user code; None if it fails, because the value may have another form."""
    try:
        return call()
    except NotImplementedError:
        return None
    except Exception as error:  # noqa: BLE001 - user code
        format_error(error)
        return None
