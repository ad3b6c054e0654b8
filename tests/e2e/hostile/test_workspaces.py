"""Workspaces that are made to be hard to save: the control plane stays small, and answers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tests.e2e.hostile.conftest import either_variant
from tests.e2e.hostile.host import MiB, eventually, peak

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box

pytestmark = either_variant

NASTY = r"""
import contextlib, os, socket, sys
os.mkfifo("pipe")
link = socket.socket(socket.AF_UNIX)
link.bind("socket")
with open("sparse", "wb") as file:
    file.truncate(200 << 20)
    file.seek(100 << 20)
    file.write(b"in the middle")
with open("holes", "wb") as file:
    for number in range(500):
        os.pwrite(file.fileno(), b"x", number << 16)
os.mkdir("shut")
open("shut/file", "w").write("kept")
os.chmod("shut/file", 0)
os.chmod("shut", 0)
open("plain", "w").write("plain")
os.link("plain", "also plain")
os.symlink("/etc/passwd", "out")
os.symlink("loop", "loop")
os.utime("plain", (1 << 33, 1 << 33))
with contextlib.suppress(OSError):
    os.setxattr("plain", "user.x", b"y" * 1000)
for name in (b"\xff\xfe", b"line\nbreak", b"\x1b[2J", b"n" * 255, "é".encode(), b".atoll-upload-0"):
    os.close(os.open(b"/workspace/" + name, os.O_CREAT | os.O_WRONLY))
top = os.open(".", os.O_RDONLY)
os.chdir(top)
for _ in range(5000):
    os.mkdir("d")
    os.chdir("d")
os.fchdir(top)
os.mkdir("many")
for number in range(20000):
    os.close(os.open(f"many/{number}", os.O_CREAT | os.O_WRONLY))
"""
RESTLESS = r"""
import itertools, os
open("restless", "wb").write(bytes(1 << 20))
os.mkdir("come")
open("ready", "w").close()
for number in itertools.count():
    if os.path.exists("stop"):
        break
    with open("restless", "r+b") as file:
        file.truncate(number % 3 << 19)
        file.write(os.urandom(100))
    os.rename("come", "go")
    os.symlink("/etc", "come")
    os.unlink("come")
    os.rename("go", "come")
    open(f"come/{number % 50}", "w").write("x" * (number % 5000))
"""
LOOK = r"""
import os
print(os.path.getsize("sparse"), os.stat("sparse").st_blocks * 512 < 1 << 20)
with open("sparse", "rb") as file:
    file.seek(100 << 20)
    print(file.read(13).decode())
os.chmod("shut", 0o700); os.chmod("shut/file", 0o600)
print(open("shut/file").read(), open("also plain").read(), os.readlink("out"), os.readlink("loop"))
print(os.path.exists("pipe"), os.path.exists("socket"), len(os.listdir("many")))
print(sorted(name for name in os.listdir(b".") if len(name) == 255 or b"\n" in name))
"""


def test_saving_a_pathological_workspace_uses_little_memory_and_blocks_no_request(
    target: Target, boxes: Callable[..., Box]
) -> None:
    box = boxes(memory="512Mi", disk="256Mi")
    made = box.run(NASTY, timeout=60)
    assert made["status"] == "success", made
    restless = box.submit(RESTLESS, timeout=120)
    eventually(lambda: box.client.get(f"{box.files}/ready").status_code == 200, "the start")
    before = peak(target.pid)
    over = threading.Event()
    slowest: list[float] = []

    def ask() -> None:
        with target.server.client() as client:
            while not over.is_set():
                slowest.append(client.get("/api/v1/sessions").elapsed.total_seconds())

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(2):
            saved = box.client.post(f"{box.url}/checkpoint")
            assert saved.status_code == 200, saved.text
        box.client.put(f"{box.files}/stop", content=b"")
        assert box.result(restless)["status"] == "success"
        assert box.client.post(f"{box.url}/checkpoint").status_code == 200
    finally:
        over.set()
        asking.join()
    assert peak(target.pid) - before < 200 * MiB
    assert len(slowest) > 5, "it answered meanwhile"
    copy = boxes(memory="512Mi", disk="256Mi", started_from=box.id)
    assert copy.printed(LOOK).splitlines() == [
        f"{200 << 20} True",
        "in the middle",
        "kept plain /etc/passwd loop",
        "False False 20000",
        str(sorted([b"line\nbreak", b"n" * 255])),
    ]
    copy.assert_usable()
