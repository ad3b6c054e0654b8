"""
A program's output while it runs, and its end as an exit code.

Bytes are passed on as they are, stdout to stdout and stderr to stderr. Whatever ends the watching
early, Ctrl-C or a reader that left, cancels the execution.
"""

import signal
import sys
from contextlib import closing, suppress
from json import dumps as encode
from typing import TYPE_CHECKING, cast

from atoll.cli import output
from atoll.errors import AtollError

if TYPE_CHECKING:
    from collections.abc import Generator

    from atoll.sdk.displays import Display
    from atoll.sdk.sync import Execution
    from atoll.sdk.values import Event, Result

TIMED_OUT = 124


def show(execution: "Execution", *, json: bool) -> int:
    """Until it ends; the exit code is for this process."""
    sinks = {} if json else {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    seen = {"stdout": bytearray(), "stderr": bytearray()}
    sizes = {"stdout": 0, "stderr": 0}
    result: Result | None = None
    try:
        with closing(cast("Generator[Event]", execution.events())) as events:
            for event in events:
                result = event.result
                if event.display is not None and not json:
                    sys.stdout.buffer.write(_shown(event.display))
                    sys.stdout.buffer.flush()
                if (sink := sinks.get(event.kind)) is not None:
                    sink.write(event.data)
                    sink.flush()
                    sizes[event.kind] += len(event.data)
                    # The end is enough to know whether an error was told already.
                    seen[event.kind] = (seen[event.kind] + event.data)[-65536:]
    except BaseException:
        with suppress(AtollError, RuntimeError):
            execution.cancel()
        raise
    assert result is not None, "events end with a result"
    if json:
        output.as_json(result)
    else:
        for name, full in (("stdout", result.stdout_bytes), ("stderr", result.stderr_bytes)):
            if sizes[name] < full:
                output.note(f"{name} was cut: {sizes[name]} of {full} bytes are shown.")
        _explain(result, bytes(seen["stderr"]).decode("utf-8", "replace"))
        if result.ok and result.return_value is not None:
            output.note(f"handler returned {encode(result.return_value)}")
    return exit_code(result)


def _shown(display: "Display") -> bytes:
    """As text; what has no such form is named."""
    text = display.text
    if text is None:
        text = f"<{', '.join(display.data)}>"
    return f"{text}\n".encode("utf-8", "replace")


def exit_code(result: "Result") -> int:
    if result.ok:
        return result.exit_code or 0
    if result.status == "timeout":
        return TIMED_OUT
    if result.signal:
        with suppress(KeyError):
            return 128 + signal.Signals[result.signal]
    return result.exit_code or 1


def _explain(result: "Result", told: str) -> None:
    """What the program did not say itself."""
    if result.ok or (result.error is not None and result.error.code == "exit"):
        return  # an exit code speaks for itself
    if result.error is not None:
        if result.error.traceback and result.error.message not in told:
            sys.stderr.write(result.error.traceback)
        elif result.error.message not in told:
            output.error(result.error.message, result.error.code)
    elif result.status == "timeout":
        output.error(f"It did not end within {result.execution_time:g} s.", "timeout")
    elif result.cause not in (None, "exit"):
        output.error(f"It was ended: {result.signal or result.cause}.", str(result.cause))
