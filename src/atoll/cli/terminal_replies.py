"""
Filters replies of the terminal out of typed input.

Replayed output may contain terminal queries of programs that have ended. The terminal answers them,
and the answers would be typed into the current program. Replies are recognized by their form, which
some terminals also use for Shift-F3, so the filter is only active shortly after the replay.
"""

import re

FILTER_SECONDS = 2.0
"""How long after the first replayed output replies are filtered."""
_MAX_REPLY = 4096
_REPLY = re.compile(
    rb"\x1b\[\??\d+;\d+(;\d+)?R"  # cursor position
    rb"|\x1b\[[?>=][\d;]*c"  # device attributes
    rb"|\x1b\[\??[\d;]+\$y"  # modes
    rb"|\x1b\[\??[\d;]*n"  # status
    rb"|\x1b\[\d+;\d+;\d+t"  # size
    rb"|\x1b\[\?\d+u"  # keyboard protocol
    rb"|\x1b\]\d+;[^\x07\x1b]*(?:\x07|\x1b\\)"  # colours
    rb"|\x1bP[\d>!][^\x1b]*\x1b\\"  # version and settings
)
_BEGUN = re.compile(rb"\x1b(?:\[[?>=\d][\d;]*\$?|\]\d[^\x07\x1b]*\x1b?|P[\d>!][^\x1b]*\x1b?)\Z")
"""The beginning of an incomplete reply. Keys are sent whole, and none begins like this."""


class ReplyFilter:
    """Removes replies from typed input, however they are split."""

    def __init__(self) -> None:
        self._held = b""

    def filter(self, data: bytes, *, active: bool = True) -> bytes:
        """The input without replies. If not `active`, all of it and what was held back."""
        data, self._held = self._held + data, b""
        if not active:
            return data
        data = _REPLY.sub(b"", data)
        begun = _BEGUN.search(data)
        if begun is None or len(begun[0]) > _MAX_REPLY:
            return data
        self._held = begun[0]
        return data[: begun.start()]
