"""
The command line, `atoll`.

A failed command prints one line on stderr and exits with 1, or 2 for wrong usage. With `--json`,
stdout is JSON and an error is a JSON object on stderr. Modules import the client and the server
inside the commands that use them, so that `atoll --help` and completion stay fast.
"""

from __future__ import annotations

import atexit
from gc import freeze


def main() -> None:
    from atoll.cli.commands import app

    # Saves time at exit, when the garbage collector would visit every imported object.
    atexit.register(freeze)
    app(prog_name="atoll")
