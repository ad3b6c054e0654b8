"""A real server whose sessions have a hostile image, and what holds whatever that image sends."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.hostile.conftest import VARIANTS, Target, attackable
from tests.e2e.hostile.host import Box
from tests.fuzz import image
from tests.fuzz.hostile import Said
from tests.rootfs import build_rootfs

STREAM = 0xABCDEF
"""Stands for the stream of the run where frames are made before it is known."""


def build_hostile_image(place: Path) -> Path:
    """A root file system whose interpreter plays executor; `mute` is one that says nothing."""
    build_rootfs(place)
    programs = place / "usr/local/bin"
    (programs / "python3").rename(programs / "true-python3")
    source = Path(image.__file__).read_text()
    for name in ("python3", "mute"):
        program = programs / name
        program.write_text(f"#!/usr/local/bin/true-python3 -IS\n{source}")
        program.chmod(0o755)
    return place


@contextmanager
def hostile_server(home: Path, start_timeout: int = 30) -> Iterator[Target]:
    """With a template `python3` of the hostile image, and `mute`."""
    with attackable(VARIANTS[0], home, ATOLL_LINK__START_TIMEOUT=str(start_timeout)) as target:
        root = build_hostile_image(target.server.data_dir / "rootfs" / "hostile")
        for name in ("python3", "mute"):
            body = {
                "id": name, "name": name, "image": str(root), "pool_size": 0,
                "python": f"/usr/local/bin/{name}",
            }  # fmt: skip
            made = target.client.post("/api/v1/templates", json=body)
            assert made.status_code == 201, made.text
        yield target


def code_of(script: list[Said]) -> str:
    """The code of a run that has the image send these frames."""
    data = b"".join(said.encoded(STREAM) for said in script)
    text = base64.b64encode(data).decode()
    stream = STREAM.to_bytes(4, "big")
    return (
        f"import base64\ndata = base64.b64decode({text!r})\n"
        f"link.send(data.replace({stream!r}, stream.to_bytes(4, 'big')))\n"
        "link._socket.shutdown(2)"
    )


def play(box: Box, script: list[Said]) -> dict[str, Any]:
    """Whatever is sent, the execution has an end, and it can be written down and read."""
    result = box.run(code_of(script), timeout=5)
    assert result["status"] in ("success", "failed", "timeout", "error"), result
    assert len(result["stdout"]) <= 2**20
    assert result["execution_time"] >= 0
    return result
