"""Questions, answers and messages as text of at most `MAX_MESSAGE_SIZE` bytes."""

from __future__ import annotations

import json
from typing import Any

from atoll.coordination.base import MAX_MESSAGE_SIZE
from atoll.errors import TooLarge


def encode(content: dict[str, Any]) -> str:
    return check_size(json.dumps(content, separators=(",", ":")))


def decode(text: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(text)
    return content


def check_size(text: str) -> str:
    # JSON from a client may contain half a surrogate pair, which must not fail here.
    if len(text) > MAX_MESSAGE_SIZE or len(text.encode(errors="surrogatepass")) > MAX_MESSAGE_SIZE:
        raise TooLarge(
            f"A message, a question or an answer has at most {MAX_MESSAGE_SIZE} bytes."
            " Put longer content into a file of the session.",
            code="message_too_large",
        )
    return text
