"""Limits that both ends of a link rely on."""

MAX_STREAMS = 1024
"""Open requests of one connection."""
MAX_APPROVAL_BYTES = 1024 * 1024
"""Bytes of all questions and answers of one run; they stay in its log."""
JOURNAL_FILE_SIZE = 64 * 1024 * 1024
"""Bytes of a journal file. The control plane counts them towards an instance's disk."""
