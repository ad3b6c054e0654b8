"""
A program's output while it runs, and its end as an exit code.

Bytes are passed on as they are, stdout to stdout and stderr to stderr. What the program asks a
person is asked on the terminal, where there is one. Whatever ends the watching early, Ctrl-C or a
reader that left, cancels the execution, unless it was only looked at.
"""

import signal
import sys
from contextlib import closing, suppress
from json import dumps as encode
from typing import TYPE_CHECKING, cast

from atoll.cli import output
from atoll.errors import AtollError, Conflict

if TYPE_CHECKING:
    from collections.abc import Generator

    from atoll.sdk.displays import Display
    from atoll.sdk.sync import Execution
    from atoll.sdk.values import Approval, Event, Result

TIMED_OUT = 124
_NOBODY = "There is nobody to ask."


def show(
    execution: "Execution",
    *,
    json: bool,
    own: bool = True,
    others: bool = True,
    function: str | None = None,
) -> int:
    """
    Until it ends; the exit code is for this process. `own` is whether the execution ends with the
    watching, `others` whether somebody else could answer its questions. What a `function` that was
    called returns is on stdout, as JSON; of a handler it is only told.
    """
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
                else:
                    _comment(event, json=json)
                if event.approval is not None and event.approval.asked:
                    _ask(execution, event.approval, others=others)
    except KeyboardInterrupt:
        output.note(f"{execution.id} " + (_cancelled(execution) if own else "goes on."))
        raise
    except BaseException:
        if own:
            _cancelled(execution)
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
            if function is None:
                output.note(f"handler returned {encode(result.return_value)}")
            else:
                output.note(f"{function} returned:")
                output.as_json(result.return_value, indent=None)
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


def _cancelled(execution: "Execution") -> str:
    try:
        status = execution.cancel().status
    except (AtollError, RuntimeError) as error:
        return f"could not be cancelled: {error}"
    return "was cancelled." if status == "cancelled" else f"had ended: {status}."


def _comment(event: "Event", *, json: bool) -> None:
    """What a person who waits would like to know."""
    if json:
        return
    if event.retry is not None:
        cause = event.retry.message or event.retry.cause or "lost"
        output.note(f"attempt {event.retry.attempt - 1} was lost ({cause}); it is tried again.")
    elif event.ahead and sys.stderr.isatty():
        output.note(f"waits behind {event.ahead} other(s).")


def _ask(execution: "Execution", approval: "Approval", *, others: bool) -> None:
    data = "" if approval.data is None else f" {encode(approval.data)}"
    output.note(f"it asks: {approval.question}{data}")
    # Answered by somebody else, or too late: the program was told.
    with suppress(Conflict):
        if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
            sys.stderr.write("approve? [y/N] ")
            sys.stderr.flush()
            if sys.stdin.readline().strip().lower() in ("y", "yes"):
                execution.approve(approval_id=approval.id)
            else:
                execution.refuse(approval_id=approval.id)
        elif others:
            output.note(f"answer with: atoll execution approve {execution.id}, or refuse")
        else:
            execution.refuse(_NOBODY, approval_id=approval.id)


def _explain(result: "Result", told: str) -> None:
    """What the program did not say itself."""
    if result.ok or (result.error is not None and result.error.code == "exit"):
        return  # an exit code speaks for itself
    if result.error is not None:
        if result.error.traceback and result.error.message not in told:
            sys.stderr.write(output.visible(result.error.traceback))
        elif result.error.message not in told:
            output.error(result.error.message, result.error.code)
    elif result.status == "timeout":
        output.error(f"It did not end within {result.execution_time:g} s.", "timeout")
    elif result.cause not in (None, "exit"):
        output.error(f"It was ended: {result.signal or result.cause}.", str(result.cause))
