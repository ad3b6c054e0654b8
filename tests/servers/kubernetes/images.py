"""
Images for the nodes, as OCI archives that `ctr` imports: no registry can be reached.

`PYTHON` has a shell, the usual tools and Python; `BARE` has busybox and nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import platform
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.missing import missing
from tests.rootfs import put
from tests.servers.images import make_archives

PYTHON, BARE, PAUSE = "localhost/python:3", "localhost/bare:1", "localhost/pause:1"
PAUSE_PROGRAM = "busybox_pause"
PATH = "PATH=/usr/local/bin:/usr/bin:/bin"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def make_images(directory: Path) -> list[Path]:
    """Archives of `PYTHON` and `BARE`, made once per directory."""
    python, bare = directory / "python.oci.tar", directory / "bare.oci.tar"
    layer = make_archives(directory).python
    with (directory / "oci.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not python.exists():
            pack(python, PYTHON, layer, Env=[PATH], Cmd=["bash"])
        if not bare.exists():
            with tempfile.TemporaryDirectory(dir=directory) as place:
                pack(bare, BARE, pack_busybox(Path(place)), Env=[PATH], Cmd=["/bin/sh"])
    return [python, bare]


def make_pause(archive: Path) -> Path:
    """
    The image that each pod has beside its own. Its process has one thread, as that of a real
    cluster, because it has the uid of user code, whose number of threads is limited.
    """
    layer = archive.with_suffix(".layer")
    with tarfile.open(layer, "w") as packed:
        packed.add(_busybox(), PAUSE_PROGRAM)
    pack(archive, PAUSE, layer, Entrypoint=[f"/{PAUSE_PROGRAM}", "sleep", str(2**31 - 1)])
    layer.unlink()
    return archive


def pack(archive: Path, reference: str, layer: Path, **config: Any) -> None:
    """Write an image of one layer, a tar file; `config` as in the OCI specification."""
    layer_digest = _digest(layer)
    small: dict[str, bytes] = {}

    def put_json(content: Mapping[str, Any]) -> dict[str, Any]:
        data = json.dumps(content).encode()
        digest = hashlib.sha256(data).hexdigest()
        small[f"blobs/sha256/{digest}"] = data
        return {"digest": f"sha256:{digest}", "size": len(data)}

    machine = platform.machine()
    image = put_json(
        {
            "architecture": _ARCHITECTURES.get(machine, machine),
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        }
    )
    about = {"digest": f"sha256:{layer_digest}", "size": layer.stat().st_size}
    manifest = put_json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **image},
            "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", **about}],
        }
    )
    entry = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        **manifest,
        "annotations": {"io.containerd.image.name": reference},
    }
    small["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    small["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
    part = archive.with_suffix(".part")
    with tarfile.open(part, "w") as packed:
        for name, data in small.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))
        packed.add(layer, f"blobs/sha256/{layer_digest}")
    part.rename(archive)


def pack_busybox(place: Path) -> Path:
    busybox = _busybox()
    root = place / "root"
    put(root, busybox, "/bin/busybox")
    for name in _applets(busybox):
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    for name in ("dev", "etc", "proc", "sys", "tmp", "var"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    layer = place / "layer.tar"
    with tarfile.open(layer, "w") as packed:
        packed.add(root, ".")
    return layer


def _busybox() -> str:
    found = shutil.which("busybox", path="/usr/bin:/bin")
    if found is None:
        missing("busybox is not installed (package busybox-static)")
    return found


def _applets(busybox: str) -> Iterator[str]:
    done = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    yield from done.stdout.split()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
