"""
The messages of a console in both directions; docs/reference/websocket.md lists them.

Clients may send anything: `parse` raises `InvalidRequest` for what is not a message.
"""

from __future__ import annotations

import base64
import binascii
import json
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.errors import AtollError, InvalidRequest
from atoll.protocol import frames

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.model.execution import Execution
    from atoll.service.executions.console import Output, State

MAX_SIDE = 65_535
"""Most rows or columns of a terminal."""
MAX_PIECE = 64 * 1024
SIGNALS = ("HUP", "INT", "QUIT", "KILL", "TERM", "USR1", "USR2", "TSTP", "STOP", "CONT", "WINCH")


@dataclass(frozen=True, slots=True)
class Stdin:
    data: bytes
    eof: bool = False


@dataclass(frozen=True, slots=True)
class Resize:
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class Signal:
    number: int


@dataclass(frozen=True, slots=True)
class Close:
    end: bool = False


FromClient = Stdin | Resize | Signal | Close


def parse(data: bytes | str) -> FromClient:
    """A binary message is input; a text message is a JSON object with a `type`."""
    if isinstance(data, bytes):
        return Stdin(data)
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise _bad("A text message must be a JSON object.") from None
    if not isinstance(message, dict):
        raise _bad("A text message must be a JSON object.")
    kind = message.get("type")
    if kind == "stdin":
        return Stdin(_input(message), _flag(message, "eof"))
    if kind == "resize":
        return Resize(_side(message, "rows"), _side(message, "cols"))
    if kind == "signal":
        return _signal(message.get("signal"))
    if kind == "close":
        return Close(_flag(message, "end"))
    raise _bad("type: must be one of stdin, resize, signal and close.")


def _bad(words: str, code: str = "bad_message") -> InvalidRequest:
    return InvalidRequest(words, code=code)


def _input(message: dict[str, Any]) -> bytes:
    text, encoded = message.get("data"), message.get("base64")
    if isinstance(text, str) and encoded is None:
        # Half of a surrogate pair is not a character and has no UTF-8.
        return text.encode("utf-8", "replace")
    if isinstance(encoded, str) and text is None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raise _bad("base64: this is not base64.") from None
    if text is None and encoded is None and message.get("eof") is True:
        return b""
    raise _bad("stdin: give either data (text) or base64.")


def _flag(message: dict[str, Any], name: str) -> bool:
    value = message.get(name, False)
    if not isinstance(value, bool):
        raise _bad(f"{name}: must be true or false.")
    return value


def _side(message: dict[str, Any], name: str) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIDE:
        raise _bad(f"{name}: must be an integer from 1 to {MAX_SIDE}.")
    return value


def _signal(name: object) -> Signal:
    short = name.removeprefix("SIG") if isinstance(name, str) else None
    if short not in SIGNALS:
        raise _bad(f"signal: must be one of {', '.join(SIGNALS)}.", "unknown_signal")
    return Signal(int(signal.Signals[f"SIG{short}"]))


# To the client


def output(piece: Output, *, as_json: bool) -> Iterator[bytes | str]:
    """Stdout as binary messages, everything else as JSON; a large piece in several messages."""
    for start in range(0, len(piece.data), MAX_PIECE):
        data = piece.data[start : start + MAX_PIECE]
        if piece.channel == frames.STDOUT and not as_json:
            yield data
            continue
        last = start + MAX_PIECE >= len(piece.data)
        yield _encode(
            {
                "type": "stdout" if piece.channel == frames.STDOUT else "stderr",
                "base64": base64.b64encode(data).decode(),
                # A client that resumes after a part of a piece gets the complete piece again.
                "position": piece.position if last else piece.position - 1,
            }
        )


def status(state: State, execution_id: str, *, terminal: bool) -> str:
    return _encode(
        {
            "type": "status",
            "execution_id": execution_id,
            "status": state.status.value,
            "attempt": state.attempt + 1,
            "typing": state.typing,
            "terminal": terminal,
        }
    )


def exit_(execution: Execution) -> str:
    """How the execution ended. Its output was sent before, or is in its record."""
    outcome = execution.outcome
    return _encode(
        {
            "type": "exit",
            "execution_id": execution.id,
            "status": execution.status.value,
            "exit_code": outcome and outcome.exit_code,
            "signal": outcome and outcome.signal,
            "cause": outcome and outcome.cause,
            "error": outcome and outcome.error,
        }
    )


def error(problem: AtollError) -> str:
    content = {"type": "error", "code": problem.code, "message": problem.message}
    return _encode({**problem.details, **content})


def _encode(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))
