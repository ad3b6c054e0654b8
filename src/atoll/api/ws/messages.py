"""
The messages of a console, both ways. docs/reference/websocket.md lists them.

What a client sends may be anything; what is not a message is an `InvalidRequest` that says why.
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
"""Rows or columns."""
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
    """Bytes are input; text is a JSON object with a `type`."""
    if isinstance(data, bytes):
        return Stdin(data)
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise _bad("A text message is a JSON object.") from None
    if not isinstance(message, dict):
        raise _bad("A text message is a JSON object.")
    kind = message.get("type")
    if kind == "stdin":
        return Stdin(_input(message), _flag(message, "eof"))
    if kind == "resize":
        return Resize(_side(message, "rows"), _side(message, "cols"))
    if kind == "signal":
        return _signal(message.get("signal"))
    if kind == "close":
        return Close(_flag(message, "end"))
    raise _bad("type: one of stdin, resize, signal, close.")


def _bad(words: str, code: str = "bad_message") -> InvalidRequest:
    return InvalidRequest(words, code=code)


def _input(message: dict[str, Any]) -> bytes:
    text, encoded = message.get("data"), message.get("base64")
    if isinstance(text, str) and encoded is None:
        # Half of a pair cannot be written as UTF-8, and is no character.
        return text.encode("utf-8", "replace")
    if isinstance(encoded, str) and text is None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raise _bad("base64: this is not base64.") from None
    if text is None and encoded is None and message.get("eof") is True:
        return b""
    raise _bad("stdin: give data (text) or base64, one of the two.")


def _flag(message: dict[str, Any], name: str) -> bool:
    value = message.get(name, False)
    if not isinstance(value, bool):
        raise _bad(f"{name}: true or false.")
    return value


def _side(message: dict[str, Any], name: str) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIDE:
        raise _bad(f"{name}: a whole number from 1 to {MAX_SIDE}.")
    return value


def _signal(name: object) -> Signal:
    short = name.removeprefix("SIG") if isinstance(name, str) else None
    if short not in SIGNALS:
        raise _bad(f"signal: one of {', '.join(SIGNALS)}.", "unknown_signal")
    return Signal(int(signal.Signals[f"SIG{short}"]))


# To the client


def output(piece: Output, *, as_json: bool) -> Iterator[bytes | str]:
    """Bytes of stdout as they are, everything else as JSON; a large piece in several messages."""
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
                # Who goes on behind the first part of a piece is given the whole of it again.
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
    """How it ended; its output was told, or is to be had from the record."""
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
