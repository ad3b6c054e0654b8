"""
Checks of values that come over a link: type, size, and range.

Each function returns a valid value unchanged and raises `ProtocolViolation` otherwise. JSON is
limited before it is parsed, by its length and by the number of its values: parsing holds the
interpreter's lock, so a large document would delay all other work.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from atoll.link.errors import ProtocolViolation
from atoll.model import json_size
from atoll.protocol import frames

MAX_JSON = 1024 * 1024
MAX_EVENT = 128 * 1024
"""An event may hold a file's entry, whose path has up to 16 Ki characters."""
MAX_ERROR = 64 * 1024
MAX_PIECE = 256 * 1024
"""Bytes of DATA: a batch of the entries of a scan, of which the last may be long."""
PAYLOADS = {
    frames.HELLO: MAX_JSON,
    frames.DATA: MAX_PIECE,
    frames.OUTPUT: frames.CHUNK + frames.OUTPUT_HEADER.size,
    frames.EVENT: MAX_EVENT,
    frames.END: MAX_JSON,
    frames.ERROR: MAX_ERROR,
    frames.CREDIT: frames.CREDIT_BODY.size,
}
"""Largest payload of each kind of frame that an executor may send."""
MAX_VALUES = 64 * 1024
"""Values in one frame of JSON, including keys."""
SMALL_JSON = 16 * 1024
"""Bytes of JSON that are parsed quickly whatever they contain."""
MAX_DIGITS = 32
LARGEST = 2**63 - 1
MAX_PATH = 16 * 1024
MAX_NAME = 256
MAX_TEXT = 4096

_NO_PATH = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""The other surrogates stand for bytes of a path that are not UTF-8."""
_CODE = re.compile("[a-z][a-z0-9_]{0,63}")


def wrong(what: str) -> ProtocolViolation:
    return ProtocolViolation(f"The executor sent an invalid {what}.")


def decoded(payload: bytes) -> dict[str, Any]:
    """Parse a JSON object at bounded cost."""
    if len(payload) <= SMALL_JSON:
        try:
            return frames.decode_json(payload)  # type: ignore[no-any-return]
        except frames.ProtocolError as error:
            raise ProtocolViolation(f"The executor sent an invalid JSON object: {error}.") from None
    if not json_size.has_at_most(payload, MAX_VALUES):
        raise ProtocolViolation(f"The executor sent JSON of more than {MAX_VALUES} values.")
    try:
        text = payload.decode("utf-8", "surrogatepass")
        value = json.loads(text, parse_int=_digits, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolViolation(f"The executor sent invalid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ProtocolViolation("The executor sent JSON that is not an object.")
    return value


def _digits(text: str) -> int:
    # The time of a conversion grows with the square of the number of digits.
    if len(text) > MAX_DIGITS:
        raise ValueError("a number of too many digits")
    return int(text)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def integer(value: object, what: str, *, least: int = 0, most: int = LARGEST) -> int:
    if type(value) is not int or not least <= value <= most:
        raise wrong(what)
    return value


def number(value: object, what: str, most: float) -> float:
    """A number from 0 to `most`; neither NaN nor infinite."""
    if type(value) not in (int, float):
        raise wrong(what)
    # An integer may be too large for a float.
    if not 0 <= value <= most or math.isnan(value):  # type: ignore[operator,arg-type]
        raise wrong(what)
    return float(value)  # type: ignore[arg-type]


def flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise wrong(what)
    return value


def text(value: object, what: str, most: int = MAX_TEXT) -> str:
    """Text that every encoding and database accepts: a lone surrogate becomes U+FFFD."""
    if not isinstance(value, str) or len(value) > most:
        raise wrong(what)
    return value if value.isascii() else _encodable(value)


def shortened(value: object, what: str, most: int = MAX_TEXT) -> str:
    """Like `text`, but cuts text that is too long."""
    if not isinstance(value, str):
        raise wrong(what)
    return text(value[:most], what, most)


def _encodable(value: str) -> str:
    return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def code(value: object) -> str:
    """The code of an error, or the name of an event."""
    if not isinstance(value, str) or _CODE.fullmatch(value) is None:
        raise wrong("code")
    return value


def path(value: object, what: str = "path") -> str:
    """Text in which bytes that are not UTF-8 are lone surrogates (PEP 383)."""
    if not isinstance(value, str) or len(value) > MAX_PATH or _NO_PATH.search(value):
        raise wrong(what)
    return value


def fields(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(what)
    return value


def items(value: object, what: str, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise wrong(what)
    return value
