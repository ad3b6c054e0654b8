"""
The type of an artifact, derived from its path.

`log`: named `*.log`, or in a directory `logs`. `output`: in a directory `output` or `outputs`, and
not a log. `artifact`: everything else.
"""

from __future__ import annotations

LOGS = frozenset({"logs"})
OUTPUTS = frozenset({"output", "outputs"})


def artifact_type(path: str) -> str:
    *above, name = path.removeprefix("/workspace/").split("/")
    if name.lower().endswith(".log") or LOGS & set(above):
        return "log"
    return "output" if OUTPUTS & set(above) else "artifact"
