"""
What an engine tells while it pulls or builds, as lines for a person.

An engine tells of each layer several times a second. Of that, a line is made when a layer is at
something else, and at each quarter of what is counted; what commands print comes as it is.
"""

from __future__ import annotations

from typing import Any

QUARTERS = 4
MOST_LINES = 4000
"""Lines of one pull; more than so many layers have nobody reads."""
LONGEST = 1000
"""Characters of one."""


class Progress:
    def __init__(self) -> None:
        self._last: dict[str, tuple[str, int]] = {}
        """What was last told of a layer: its status, and how many quarters of it."""
        self._lines = 0

    def text(self, message: dict[str, Any]) -> str:
        """What is worth telling of a message; mostly nothing."""
        printed = message.get("stream")
        if isinstance(printed, str):
            return printed
        line = self._line(message)
        if not line or self._lines >= MOST_LINES:
            return ""
        self._lines += 1
        return line[:LONGEST] + "\n"

    def _line(self, message: dict[str, Any]) -> str:
        status, layer = message.get("status"), message.get("id")
        if not isinstance(status, str) or not status:
            return ""
        if not isinstance(layer, str) or not layer:
            return status
        quarter = _quarter(message.get("progressDetail"))
        before = self._last.get(layer)
        if before is not None and before[0] == status and quarter <= before[1]:
            return ""
        self._last[layer] = (status, quarter)
        share = f" {quarter * 100 // QUARTERS}%" if quarter else ""
        return f"{layer}: {status}{share}"


def _quarter(detail: Any) -> int:
    if not isinstance(detail, dict):
        return 0
    current, total = detail.get("current"), detail.get("total")
    if not isinstance(current, int) or not isinstance(total, int) or total <= 0:
        return 0
    return min(QUARTERS, max(0, current * QUARTERS // total))
