"""Questions and answers as text of at most `MAX_PAYLOAD_SIZE` bytes."""

from __future__ import annotations

import json
from typing import Any

from atoll.coordination.base import MAX_PAYLOAD_SIZE
from atoll.errors import TooLarge


def encode(content: dict[str, Any]) -> str:
    # ASCII: what is not is escaped, so a character is a byte.
    text = json.dumps(content, separators=(",", ":"))
    if len(text) > MAX_PAYLOAD_SIZE:
        raise TooLarge(
            f"A question or an answer has at most {MAX_PAYLOAD_SIZE} bytes."
            " Put longer content into a file of the session.",
            code="message_too_large",
        )
    return text


def decode(text: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(text)
    return content
