"""
The command line, `atoll`.

A failed command prints one line on stderr and exits with 1, or 2 for wrong usage. With `--json`,
stdout is JSON and an error is a JSON object on stderr. Modules import the client and the server
inside the commands that use them, so that `atoll --help` and completion stay fast.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

_ALLOCATIONS = 50_000
"""Objects that are made before the garbage collector looks for garbage."""


def main() -> None:
    # What is imported stays: to visit it again and again, and at exit, would take a sixth of the
    # time of `atoll run`.
    gc.set_threshold(_ALLOCATIONS)
    atexit.register(gc.freeze)
    from atoll.cli.commands import tree

    # Completion needs all commands.
    words = [] if "_ATOLL_COMPLETE" in os.environ else sys.argv[1:]
    tree(words)(prog_name="atoll")
