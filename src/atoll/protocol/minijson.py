"""
JSON by the interpreter's own C code, without the `json` package.

Importing `json` also imports `re` and `enum`: that takes 7 ms of every start, and a megabyte of
every idle instance. This module reads and writes the same JSON without options. If the interpreter
has no such C code, or a different version of it, it uses the package.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class _Context:
    """The attributes that the C scanner needs."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    memo: dict[str, str] = {}  # noqa: RUF012 - the scanner's own

    @staticmethod
    def parse_constant(name: str) -> Any:
        raise ValueError("%s is not JSON" % name)


def _unknown(value: Any) -> Any:
    raise TypeError("an object of type %s is not JSON serializable" % type(value).__name__)


def _c_functions() -> tuple[Callable[[Any], str], Callable[[str], Any]]:
    import _json

    scan = _json.make_scanner(_Context)  # type: ignore[arg-type]
    encode = _json.make_encoder(
        None, _unknown, _json.encode_basestring_ascii, None, ":", ",", False, False, False
    )

    def dump(value: Any) -> str:
        return "".join(encode(value, 0))

    def load(text: str) -> Any:
        text = text.strip(" \t\n\r")
        try:
            value, end = scan(text, 0)
        except (StopIteration, SystemError):
            # SystemError: the C code cannot raise the package's error class, which is not imported.
            raise ValueError("this is not JSON") from None
        if end != len(text):
            raise ValueError("extra data after the JSON")
        return value

    if load(dump({"a": [1, 2.5, None, True, "\u00e9"]})) != {"a": [1, 2.5, None, True, "\u00e9"]}:
        raise ImportError("the C code behaves differently")
    return dump, load


def _package_functions() -> tuple[Callable[[Any], str], Callable[[str], Any]]:
    import json

    def dump(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)

    def load(text: str) -> Any:
        return json.loads(text, parse_constant=_Context.parse_constant)

    return dump, load


try:
    _dump, _load = _c_functions()
except (ImportError, AttributeError, TypeError):
    _dump, _load = _package_functions()


def dumps(value: Any) -> bytes:
    return _dump(value).encode("ascii")


def loads(data: bytes) -> Any:
    """Raises ValueError or RecursionError for invalid JSON."""
    return _load(data.decode("utf-8", "surrogatepass"))
