"""Images that pretend to have Python, and one that wants to decide how it is run."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

from tests.servers.images import make_archives
from tests.servers.kubernetes.images import pack, pack_busybox

FAKE = """#!/bin/sh
for last; do :; done
# The last argument of the executor is "-"; that of the program that looks into an image is not.
if [ "$last" != - ]; then
    echo '{"python": "/bin/python3", "path": "/bin", "volumes": []}' > /dev/termination-log
    exit 0
fi
%s
"""
FAKES = {
    "flood": "yes 0123456789012345678901234567890123456789",
    "silent": "exec sleep 100000",
    "liar": "echo key; echo ready; exec sleep 100000",
    "leaver": "echo goodbye; exit 3",
}
"""What their interpreters do, by name."""
WILFUL = {
    "Entrypoint": ["/bin/false"],
    "User": "0",
    "WorkingDir": "/absent",
    "Volumes": {"/data": {}, "/usr/share": {}},
    "Env": [
        "PATH=/usr/local/bin:/usr/bin:/bin", "LD_PRELOAD=/workspace/absent.so",
        "PYTHONSTARTUP=/workspace/startup.py", "PYTHONPATH=/data", "PYTHONHOME=/absent",
    ],
}  # fmt: skip


def reference(name: str) -> str:
    return f"localhost/{name}:1"


def make(directory: Path) -> list[Path]:
    """Archives of all of them."""
    archives = []
    for name, command in FAKES.items():
        with tempfile.TemporaryDirectory(dir=directory) as place:
            layer = pack_busybox(Path(place))
            program = (FAKE % command).encode()
            member = tarfile.TarInfo("./bin/python3")
            member.size, member.mode = len(program), 0o755
            with tarfile.open(layer, "a") as packed:
                packed.addfile(member, io.BytesIO(program))
            archives.append(directory / f"{name}.oci.tar")
            pack(archives[-1], reference(name), layer, Env=["PATH=/bin"])
    archives.append(directory / "wilful.oci.tar")
    pack(archives[-1], reference("wilful"), make_archives(directory).python, **WILFUL)
    return archives
