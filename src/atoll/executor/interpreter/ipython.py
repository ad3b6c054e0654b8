"""
IPython's shell in a context: magics, `!command`, `name?` and its formatters, without a terminal.

No history, no colours, and nothing is written to a profile.
"""

from __future__ import annotations

import os
import sys
import warnings

from . import matplotlib_figures, shell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .context_interpreter import ContextInterpreter

PROFILE = "/tmp/.ipython/profile_default"  # noqa: S108 - private to the instance, and not made


def make(interpreter: ContextInterpreter) -> IPythonShell:
    """Raises ImportError where there is no IPython."""
    from IPython import paths
    from IPython.core import interactiveshell, page
    from IPython.core.compilerop import CachingCompiler
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.profiledir import ProfileDir
    from traitlets import Type, observe
    from traitlets.config import Config

    class Profile(ProfileDir):
        """A profile directory that is never created."""

        def check_dirs(self, change: Any = None) -> None: ...

        @observe("location")
        def _location_changed(self, change: Any) -> None: ...

    class Compiler(CachingCompiler):
        def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
            return shell.CELL % number

    class Publisher(DisplayPublisher):
        def publish(self, data: Any, metadata: Any = None, *_: Any, **__: Any) -> None:
            interpreter.show("display", data, metadata)

        def clear_output(self, wait: bool = False) -> None: ...

    class Hook(DisplayHook):
        def write_output_prompt(self) -> None: ...

        def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
            interpreter.show("result", format_dict, md_dict)

        def log_output(self, format_dict: Any) -> None: ...

        def finish_displayhook(self) -> None:
            self._is_active = False

    class Shell(interactiveshell.InteractiveShell):
        compiler_class = Type(Compiler)
        display_pub_class = Type(Publisher)
        displayhook_class = Type(Hook)
        # Write directly to the run's output, without a terminal in between.
        system = interactiveshell.InteractiveShell.system_raw
        traceback_text = ""

        def init_ipython_dir(self, ipython_dir: Any) -> None: ...

        def init_profile_dir(self, profile_dir: Any) -> None:
            self.profile_dir = Profile(location=PROFILE)

        def init_virtualenv(self) -> None: ...

        def enable_gui(self, gui: Any = None) -> None: ...

        def ask_exit(self) -> None:
            raise SystemExit

        def showtraceback(self, exc_tuple: Any = None, *_: Any, **__: Any) -> None:
            error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
            if type(error).__name__ == "UsageError":
                self.traceback_text = "UsageError: %s\n" % error
                self.show_usage_error(error)  # type: ignore[no-untyped-call]
            elif error is not None and not isinstance(error, SystemExit):
                self.traceback_text = shell.format_error(error)

        def showsyntaxerror(self, *_: Any, **__: Any) -> None:
            self.showtraceback()

    # The originals would create these directories.
    paths.get_ipython_dir = lambda: os.path.dirname(PROFILE)
    if hasattr(interactiveshell, "PickleShareDB"):
        interactiveshell.PickleShareDB = lambda path: {}
    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    config.Completer.use_jedi = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.banner1 = ""
    found: Any = Shell.instance(config=config)
    show_page = page.as_hook(page.display_page)  # type: ignore[no-untyped-call]
    found.set_hook("show_in_pager", show_page, 90)
    for name in ("exit", "quit"):
        found.user_ns[name] = found.user_ns_hidden[name] = shell.Exit()
    formatter = found.display_formatter.formatters["image/png"]
    formatter.for_type_by_name("matplotlib.figure", "Figure", matplotlib_figures.png)
    warnings.filterwarnings("ignore", message="To exit: use")
    return IPythonShell(found)


class IPythonShell:
    def __init__(self, found: Any) -> None:
        self._shell = found

    def run(self, code: str) -> BaseException | None:
        """Run a cell; returns what it raised, after writing the traceback to stderr."""
        self._shell.traceback_text = ""
        result = self._shell.run_cell(code, store_history=True)
        error: BaseException | None = result.error_before_exec or result.error_in_exec
        return error

    def traceback(self, error: BaseException) -> str:
        """The traceback that was written for this exception."""
        return str(self._shell.traceback_text)
