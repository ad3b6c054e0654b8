"""A real server whose sessions have a hostile image, and its invariants."""

from __future__ import annotations

import base64
import io
import os
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.hostile.conftest import VARIANTS, Target, attackable
from tests.e2e.hostile.host import Box
from tests.fuzz import image
from tests.fuzz.hostile import Said
from tests.rootfs import build_rootfs
from tests.servers import docker
from tests.servers.images import PYTHON

STREAM = 0xABCDEF
"""Placeholder for the stream of the run, while it is unknown."""
HOSTILE = "atoll-test/hostile:1"
PROGRAMS = Path("usr/local/bin")
TRUE = "true-python3"
"""The interpreter that the hostile ones run on."""
ANYWHERE = ("python3", "mute")
CONTAINED: tuple[str, ...] = ("silent", "loud")
"""Hostile programs of every driver, and of those with containers (`tests.fuzz.image`)."""


def build_hostile_image(place: Path) -> Path:
    """A root file system whose interpreter plays executor."""
    build_rootfs(place)
    (place / PROGRAMS / "python3").rename(place / PROGRAMS / TRUE)
    for name in ANYWHERE:
        program = place / PROGRAMS / name
        program.write_bytes(_program())
        program.chmod(0o755)
    return place


def commit_hostile_image(engine: Path) -> str:
    """The same as an image of the engine at a socket, which has that of `tests.servers.images`."""
    contents = io.BytesIO()
    programs = {TRUE: Path(sys.executable).read_bytes()}
    programs |= dict.fromkeys((*ANYWHERE, *CONTAINED), _program())
    with tarfile.open(fileobj=contents, mode="w") as archive:
        for name, content in programs.items():
            member = tarfile.TarInfo(str(PROGRAMS / name))
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    made = docker.ask(engine, "POST", "/containers/create", json={"Image": PYTHON}).json()["Id"]
    try:
        about = {"path": "/"}
        docker.ask(
            engine, "PUT", f"/containers/{made}/archive", params=about, content=contents.getvalue()
        )
        name, _, tag = HOSTILE.rpartition(":")
        docker.ask(
            engine, "POST", "/commit", params={"container": made, "repo": name, "tag": tag}, json={}
        )
    finally:
        docker.ask(engine, "DELETE", f"/containers/{made}")
    return HOSTILE


def _program() -> bytes:
    return f"#!/{PROGRAMS / TRUE} -IS\n{Path(image.__file__).read_text()}".encode()


@contextmanager
def hostile_server(
    home: Path, start_timeout: int = 30, variant: str = VARIANTS[0], **settings: str
) -> Iterator[Target]:
    """
    With the driver of the environment (`tests.drivers.settings`), a template `python3` of the
    hostile image, and one for each other program of it.
    """
    settings |= {"ATOLL_LINK__START_TIMEOUT": str(start_timeout), "ATOLL_POOL__SIZE": "0"}
    with attackable(variant, home, **settings) as target:
        if os.environ.get("ATOLL_DRIVER") == "docker":
            engine = Path(os.environ["ATOLL_DOCKER__URL"].removeprefix("unix://"))
            found, own = commit_hostile_image(engine), CONTAINED
        else:
            found = str(build_hostile_image(target.server.data_dir / "rootfs" / "hostile"))
            own = ()
        for name in (*ANYWHERE, *own):
            body = {
                "id": name, "name": name, "image": found, "pool_size": 0,
                "python": f"/{PROGRAMS / name}",
            }  # fmt: skip
            made = target.client.post("/api/v1/templates", json=body)
            assert made.status_code == 201, made.text
        yield target


def code_of(script: list[Said]) -> str:
    """The code of a run that has the image send these frames."""
    data = b"".join(message.encoded(STREAM) for message in script)
    text = base64.b64encode(data).decode()
    stream = STREAM.to_bytes(4, "big")
    return (
        f"import base64\ndata = base64.b64decode({text!r})\n"
        f"link.send(data.replace({stream!r}, stream.to_bytes(4, 'big')))\n"
        "link.hang_up()"
    )


def play(box: Box, script: list[Said]) -> dict[str, Any]:
    """For any input the execution ends, and its record can be written and read."""
    result = box.run(code_of(script), timeout=5)
    assert result["status"] in ("success", "failed", "timeout", "error"), result
    assert len(result["stdout"]) <= 2**20
    assert result["execution_time"] >= 0
    return result
