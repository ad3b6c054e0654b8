"""Which snapshotter of containerd works in a directory."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

OVERLAY, COPY = "overlayfs", "native"
"""`native` copies all files of an image for each container: slow, but works everywhere."""
# In a mount namespace, whose end is the end of the mount.
_TRY = """
cd "$1"
mkdir lower1 lower2 upper work merged
mount -t overlay overlay -o lowerdir=lower2:lower1,upperdir=upper,workdir=work merged
"""


def choose(directory: Path) -> str:
    """Tests may run in a container, where `directory` may be on an overlay: none goes on that."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-euc", _TRY, "sh", place],
            capture_output=True,
            check=False,
        )
    return OVERLAY if done.returncode == 0 else COPY
