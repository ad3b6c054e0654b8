"""
What kind of artifact a file is, told by its path alone.

`log` is what is called `*.log` or lies beneath a directory `logs`; `output` is what lies beneath
`output` or `outputs`; everything else is an `artifact`. A log beneath `output` is a log.
"""

from __future__ import annotations

LOGS = frozenset({"logs"})
OUTPUTS = frozenset({"output", "outputs"})


def artifact_type(path: str) -> str:
    *above, name = path.removeprefix("/workspace/").split("/")
    if name.lower().endswith(".log") or LOGS & set(above):
        return "log"
    return "output" if OUTPUTS & set(above) else "artifact"
