"""
Messages from the process of a context to the supervisor.

Before it is ready it may report why it cannot start, as every run does (`child.FAILURE` and JSON).
"""

from __future__ import annotations

import struct

READY = b"r"
SHOW = b"s"  # SIZE: a display of this size follows
PIECE = b"p"  # bytes of it
DROPPED = b"o"  # SIZE: a display exceeded the limit and was dropped
DONE = b"d"  # DONE_BODY

SIZE = struct.Struct("!QQ")  # run, bytes
DONE_BODY = struct.Struct("!QB")  # run, exit code
MAX_PIECE = 32 * 1024
MAX_MESSAGE = 64 * 1024
