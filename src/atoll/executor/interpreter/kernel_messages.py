"""
What the process of a context says to the supervisor, one message a time.

Before it is ready it may say why it will not be, as every run does (`child.FAILURE` and JSON).
"""

from __future__ import annotations

import struct

READY = b"r"
SHOW = b"s"  # SIZE: a display of so many bytes follows
PIECE = b"p"  # bytes of it
DROPPED = b"o"  # SIZE: a display was larger than what is kept
DONE = b"d"  # DONE_BODY

SIZE = struct.Struct("!QQ")  # run, bytes
DONE_BODY = struct.Struct("!QB")  # run, exit code
MAX_PIECE = 32 * 1024
MAX_MESSAGE = 64 * 1024
