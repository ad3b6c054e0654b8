"""
Figures of matplotlib: drawn without a screen, shown by `plt.show()` or at the end of a run.

This module never imports matplotlib; it acts when user code has imported it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .context_interpreter import ContextInterpreter

PYPLOT = "matplotlib.pyplot"
_shown: list[Any] = []
"""Figures that the current run has shown already."""


def prepare(interpreter: ContextInterpreter) -> None:
    os.environ.setdefault("MPLBACKEND", "agg")
    if PYPLOT in sys.modules:
        _replace_show(interpreter, sys.modules[PYPLOT])
    else:
        sys.meta_path.insert(0, _Finder(interpreter))


class _Finder:
    """Waits for pyplot to be imported, and changes its `show`."""

    def __init__(self, interpreter: ContextInterpreter) -> None:
        self._interpreter = interpreter

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != PYPLOT:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        import importlib.util

        spec = importlib.util.find_spec(name)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _replace_show(self._interpreter, module)

            loader.exec_module = exec_module
        return spec


def _replace_show(interpreter: ContextInterpreter, pyplot: Any) -> None:
    original = pyplot.show

    def show(*arguments: Any, **options: Any) -> Any:
        """Show all open figures, and close them."""
        if str(pyplot.get_backend()).lower() == "agg":
            return flush(interpreter, show=True)
        return original(*arguments, **options)

    pyplot.show = show


def is_figure(value: Any) -> bool:
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(value, module.Figure)


def png(figure: Any) -> bytes:
    import io

    content = io.BytesIO()
    figure.savefig(content, format="png", bbox_inches="tight")
    if not any(shown is figure for shown in _shown):
        _shown.append(figure)
    return content.getvalue()


def flush(interpreter: ContextInterpreter, show: bool) -> None:
    """Show the open figures that were not shown yet, and close them all."""
    pyplot = sys.modules.get(PYPLOT)
    if pyplot is None:
        return
    try:
        if show:
            for number in pyplot.get_fignums():
                figure = pyplot.figure(number)
                if not any(shown is figure for shown in _shown):
                    data = {"text/plain": repr(figure), "image/png": png(figure)}
                    interpreter.show("display", data)
        if pyplot.get_fignums():
            pyplot.close("all")
    except Exception as error:  # noqa: BLE001 - drawing may run user code
        from . import shell

        shell.format_error(error)
    finally:
        del _shown[:]
