"""
What a terminal says by itself, in answer to a program that asks it something.

Output that is shown again has such questions in it, of programs that have long ended; the answers
would be typed to whatever runs now. They are told from keys by their form, which Shift-F3 shares on
some terminals; so this is for the moment after the output was shown, not for longer.
"""

import re

SECONDS = 2.0
"""How long after the first output is shown an answer is taken for one to what is old."""
_MOST = 4096
_REPLY = re.compile(
    rb"\x1b\[\??\d+;\d+(;\d+)?R"  # where the cursor is
    rb"|\x1b\[[?>=][\d;]*c"  # what it is
    rb"|\x1b\[\??[\d;]+\$y"  # its modes
    rb"|\x1b\[\??[\d;]*n"  # how it is
    rb"|\x1b\[\d+;\d+;\d+t"  # its size
    rb"|\x1b\[\?\d+u"  # how it sends keys
    rb"|\x1b\]\d+;[^\x07\x1b]*(?:\x07|\x1b\\)"  # colours
    rb"|\x1bP[\d>!][^\x1b]*\x1b\\"  # its version, its settings
)
_BEGUN = re.compile(rb"\x1b(?:\[[?>=\d][\d;]*\$?|\]\d[^\x07\x1b]*\x1b?|P[\d>!][^\x1b]*\x1b?)\Z")
"""Of an answer that is not there as a whole; a key is sent as one, and no key begins like this."""


class Replies:
    """Passes on what is typed, without such answers, however they are cut."""

    def __init__(self) -> None:
        self._held = b""

    def pass_on(self, data: bytes, *, take_out: bool = True) -> bytes:
        """Without `take_out` all of it, with what was held back."""
        data, self._held = self._held + data, b""
        if not take_out:
            return data
        data = _REPLY.sub(b"", data)
        begun = _BEGUN.search(data)
        if begun is None or len(begun[0]) > _MOST:
            return data
        self._held = begun[0]
        return data[: begun.start()]
