"""
Progress messages of a pull or a build, as lines of a log that people read.

An engine reports each layer several times a second. A line is logged when the status of a layer
changes, and at each quarter of a download. The output of commands is logged unchanged.
"""

from __future__ import annotations

from typing import Any

QUARTERS = 4
MAX_LINES = 4000
"""Lines of one pull. Output of commands does not count."""
MAX_LINE = 1000
"""Characters of one line."""


class ProgressLines:
    def __init__(self) -> None:
        self._logged: dict[str, tuple[str, int]] = {}
        """Last status and number of quarters of each layer."""
        self._lines = 0

    def text(self, message: dict[str, Any]) -> str:
        """What to log of a message; usually empty."""
        output = message.get("stream")
        if isinstance(output, str):
            return output
        line = self._line(message)
        if not line or self._lines >= MAX_LINES:
            return ""
        self._lines += 1
        return line[:MAX_LINE] + "\n"

    def _line(self, message: dict[str, Any]) -> str:
        status, layer = message.get("status"), message.get("id")
        if not isinstance(status, str) or not status:
            return ""
        if not isinstance(layer, str) or not layer:
            return status
        quarter = _quarter(message.get("progressDetail"))
        before = self._logged.get(layer)
        if before is not None and before[0] == status and quarter <= before[1]:
            return ""
        self._logged[layer] = (status, quarter)
        percent = f" {quarter * 100 // QUARTERS}%" if quarter else ""
        return f"{layer}: {status}{percent}"


def _quarter(detail: Any) -> int:
    if not isinstance(detail, dict):
        return 0
    current, total = detail.get("current"), detail.get("total")
    if not isinstance(current, int) or not isinstance(total, int) or total <= 0:
        return 0
    return min(QUARTERS, max(0, current * QUARTERS // total))
