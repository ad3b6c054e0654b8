"""Questions, answers and messages as text, none of them longer than `MAX_MESSAGE` bytes."""

from __future__ import annotations

import json
from typing import Any

from atoll.coordination.base import MAX_MESSAGE
from atoll.errors import TooLarge


def packed(content: dict[str, Any]) -> str:
    return checked(json.dumps(content, separators=(",", ":")))


def unpacked(text: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(text)
    return content


def checked(text: str) -> str:
    # What came as JSON may hold half a surrogate pair, which is no reason to fail here.
    if len(text) > MAX_MESSAGE or len(text.encode(errors="surrogatepass")) > MAX_MESSAGE:
        raise TooLarge(
            f"A message, a question or an answer has at most {MAX_MESSAGE} bytes;"
            " put what is longer into a file of the session.",
            code="message_too_large",
        )
    return text
