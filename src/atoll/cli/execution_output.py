"""
Shows the output of an execution while it runs, and turns its result into an exit code.

Output bytes are written unchanged, stdout to stdout and stderr to stderr. Questions of the program
are asked on the terminal, if there is one. Ctrl-C or a closed pipe cancels the execution, unless
the command only follows it.
"""

import sys
from contextlib import closing, suppress
from json import dumps as encode
from typing import TYPE_CHECKING, cast

from atoll.cli import exit_codes, output
from atoll.errors import AtollError, Conflict

if TYPE_CHECKING:
    from collections.abc import Generator

    from atoll.sdk.displays import Display
    from atoll.sdk.sync import Execution
    from atoll.sdk.values import Approval, Event, Result

_NO_TERMINAL = "There is no terminal to ask on."


def show(
    execution: "Execution",
    *,
    json: bool,
    own: bool = True,
    others: bool = True,
    function: str | None = None,
) -> int:
    """
    Show the execution until it ends, and return the exit code for this process.

    `own`: cancel the execution if this ends early. `others`: other clients can answer its
    questions. The return value of a `function` is printed on stdout as JSON, that of a handler is
    a note on stderr.
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
                    # The end suffices to see whether an error was printed already.
                    seen[event.kind] = (seen[event.kind] + event.data)[-65536:]
                else:
                    _comment(event, json=json)
                if event.approval is not None and event.approval.asked:
                    _ask(execution, event.approval, others=others)
    except KeyboardInterrupt:
        output.note(f"{execution.id} " + (_cancelled(execution) if own else "continues."))
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
                output.note(f"{name} is truncated: {sizes[name]} of {full} bytes shown.")
        _explain(result, bytes(seen["stderr"]).decode("utf-8", "replace"))
        if result.ok and result.return_value is not None:
            if function is None:
                output.note(f"handler returned {encode(result.return_value)}")
            else:
                output.note(f"{function} returned:")
                output.as_json(result.return_value, indent=None)
    return exit_codes.of_program(result)


def _shown(display: "Display") -> bytes:
    """The display as text, or its MIME types."""
    text = display.text
    if text is None:
        text = f"<{', '.join(display.data)}>"
    return f"{text}\n".encode("utf-8", "replace")


def _cancelled(execution: "Execution") -> str:
    try:
        status = execution.cancel().status
    except (AtollError, RuntimeError) as error:
        return f"could not be cancelled: {error}"
    return "was cancelled." if status == "cancelled" else f"had ended: {status}."


def _comment(event: "Event", *, json: bool) -> None:
    """Print notes for a waiting user."""
    if json:
        return
    if event.retry is not None:
        cause = event.retry.message or event.retry.cause or "lost"
        output.note(f"attempt {event.retry.attempt - 1} was lost ({cause}); retrying.")
    elif event.ahead and sys.stderr.isatty():
        output.note(f"waiting for {event.ahead} earlier execution(s).")


def _ask(execution: "Execution", approval: "Approval", *, others: bool) -> None:
    data = "" if approval.data is None else f" {encode(approval.data)}"
    output.note(f"approval requested: {approval.question}{data}")
    # Another client has answered, or the question has expired.
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
            execution.refuse(_NO_TERMINAL, approval_id=approval.id)


def _explain(result: "Result", printed: str) -> None:
    """Print the error, unless the program has printed it itself."""
    if result.ok or (result.error is not None and result.error.code == "exit"):
        return
    if result.error is not None:
        if result.error.traceback and result.error.message not in printed:
            sys.stderr.write(output.visible(result.error.traceback))
        elif result.error.message not in printed:
            output.error(result.error.message, result.error.code)
    elif result.status == "timeout":
        output.error(f"The program timed out after {result.execution_time:g} s.", "timeout")
    elif result.cause not in (None, "exit"):
        output.error(f"The program was killed: {result.signal or result.cause}.", str(result.cause))
