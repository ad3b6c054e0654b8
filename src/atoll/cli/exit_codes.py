"""Exit codes of the command line. Wrong usage exits with Click's 2."""

import signal
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.sdk.values import ConsoleExit, Result

FAILED = 1
TIMED_OUT = 124


def by_signal(number: int) -> int:
    return 128 + number


INTERRUPTED = by_signal(signal.SIGINT)
BROKEN_PIPE = by_signal(signal.SIGPIPE)


def of_program(ended: "Result | ConsoleExit") -> int:
    """The exit code for a process that ran a program elsewhere."""
    if ended.status in ("success", "completed"):
        return ended.exit_code or 0
    if ended.status == "timeout":
        return TIMED_OUT
    if ended.signal:
        with suppress(KeyError):
            return by_signal(signal.Signals[ended.signal])
    return ended.exit_code or FAILED
