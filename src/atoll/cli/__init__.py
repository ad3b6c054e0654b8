"""
The command line: `atoll`.

Every command says what went wrong in one line on stderr and ends with 1, or 2 for a wrong usage.
With `--json` what it prints on stdout is JSON, and an error on stderr is a JSON object. Modules
here import little at the top, so that `atoll --help` and completion are quick: the client and the
server are loaded by the commands that use them.
"""

from __future__ import annotations

import atexit
from gc import freeze


def main() -> None:
    from atoll.cli.commands import app

    # At exit the garbage collector would visit every imported object, several times.
    atexit.register(freeze)
    app(prog_name="atoll")
