"""Trees, archives, search, notices and links against what user code and strangers can do."""

from __future__ import annotations

import gzip
import io
import tarfile
import time
import zipfile
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.hostile.conftest import either_variant
from tests.e2e.hostile.host import MiB, eventually, resident

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box

pytestmark = either_variant

SWAP = """
import ctypes, os
os.makedirs("/tmp/out/deep", exist_ok=True)
for name in ("secret", "deep/secret"):
    open(f"/tmp/out/{name}", "w").write("SECRET of the outside")
os.makedirs("inside/deep", exist_ok=True)
for name in ("secret", "deep/secret"):
    open(f"inside/{name}", "w").write("harmless")
os.symlink("/tmp/out", "link")
os.rename("inside", "way")
libc = ctypes.CDLL(None)
open("ready", "w").close()
while not os.path.exists("stop"):
    for _ in range(100):
        libc.renameat2(-100, b"way", -100, b"link", 2)  # RENAME_EXCHANGE
        libc.renameat2(-100, b"way", -100, b"link", 2)
"""


def tar(**files: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def read_members(data: bytes) -> str:
    text = ""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            if member.isreg():
                file = archive.extractfile(member)
                assert file is not None
                text += file.read().decode()
    return text


def test_a_link_swapped_during_a_tree_request_is_not_followed(fresh: Box) -> None:
    execution = fresh.submit(SWAP, timeout=200)
    eventually(lambda: fresh.client.get(f"{fresh.files}/ready").status_code == 200, "the start")
    begun = time.monotonic()
    rounds = good = 0
    while (past := time.monotonic() - begun) < 4 or rounds < 10 or not good:
        assert past < 60, (rounds, good)
        rounds += 1
        packed = fresh.client.get(f"{fresh.files}/way", params={"archive": "tar"})
        if packed.status_code == 200:
            assert "SECRET" not in read_members(packed.content)
            good += 1
        whole = fresh.client.get(f"{fresh.files}/", params={"archive": "tar"})
        assert "SECRET" not in read_members(whole.content)
        found = fresh.client.get(f"{fresh.files}/search", params={"query": "SECRET"}).json()
        assert [item for item in found.get("items", []) if item["path"] != "ready"] == []
        fresh.client.get(fresh.files, params={"path": "way", "recursive": True})
        body = {"source": "way/deep", "target": "copied", "overwrite": True}
        fresh.client.post(f"{fresh.files}/copy", json=body)
        fresh.client.delete(f"{fresh.files}/copied", params={"recursive": True})
        fresh.client.put(
            f"{fresh.files}/way", params={"archive": "tar"}, content=tar(written=b"evil")
        )
        fresh.client.post(f"{fresh.files}/chmod", json={"path": "way/secret", "mode": "0666"})
    assert fresh.client.put(f"{fresh.files}/stop", content=b"").status_code == 201
    assert fresh.result(execution)["status"] == "success"
    code = (
        "import os; print(sorted(os.listdir('/tmp/out')), oct(os.stat('/tmp/out/secret').st_mode))"
    )
    assert fresh.printed(code) == "['deep', 'secret'] 0o100644"


def bomb_zip() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(8):
            archive.writestr(f"f{number}", bytes(32 * MiB))
    return out.getvalue()


def bomb_of_many_names() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number in range(60_000):
            archive.addfile(tarfile.TarInfo(f"{number % 100}/{number}"))
    return gzip.compress(out.getvalue(), 1)


BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "gzip": ("tar.gz", lambda: gzip.compress(tar(big=bytes(256 * MiB)), 1)),
    "zip": ("zip", bomb_zip),
    "names": ("tar", bomb_of_many_names),
}


@pytest.mark.parametrize(
    "kind", [pytest.param("gzip", marks=pytest.mark.every_driver), "zip", "names"]
)
def test_an_archive_bomb_fills_no_more_than_the_workspace(fresh: Box, kind: str) -> None:
    form, make = BOMBS[kind]
    before = fresh.instance
    inside = resident(fresh.pid_1)
    answer = fresh.client.put(
        f"{fresh.files}/d", params={"archive": form}, content=make(), timeout=120
    )
    if kind == "names":
        # Where nothing counts them they fit: an empty file takes no block.
        assert answer.status_code in (200, 507), answer.text
    else:
        assert (answer.status_code, answer.json()["code"]) == (507, "disk_full")
        assert fresh.client.get(fresh.files).json()["items"] == []
    assert resident(fresh.pid_1) - inside < 16 * MiB
    fresh.client.delete(f"{fresh.files}/d", params={"recursive": True})
    fresh.assert_usable()
    assert fresh.instance == before


def test_an_upload_of_a_tree_cannot_be_redirected_by_a_link(fresh: Box) -> None:
    """Files being unpacked have a path that user code can see and replace by a link."""
    trap = """
import os, shutil, time
os.makedirs("/tmp/trap", exist_ok=True)
open("ready", "w").close()
end = time.monotonic() + 4
n = 0
while time.monotonic() < end:
    for name in os.listdir("."):
        if name.startswith(".atoll-upload-"):
            for inner in ("a", "a/b"):
                try:
                    n += 1
                    os.rename(f"{name}/{inner}", f"stolen-{n}")
                    os.symlink("/tmp/trap", f"{name}/{inner}")
                except OSError:
                    pass
                shutil.rmtree(f"stolen-{n}", ignore_errors=True)
"""
    execution = fresh.submit(trap, timeout=20)
    eventually(lambda: fresh.client.get(f"{fresh.files}/ready").status_code == 200, "the start")
    content = tar(**{f"a/b/{number}": b"x" * 100 for number in range(300)})
    status = f"/api/v1/executions/{execution}/status"
    while fresh.client.get(status).json()["status"] in ("pending", "running"):
        answer = fresh.client.put(f"{fresh.files}/in", params={"archive": "tar"}, content=content)
        # Files that the code moves away may also fill its own disk.
        assert answer.status_code in (200, 400, 404, 409, 422, 507), answer.text
    look = """
import glob, os, shutil
for left in glob.glob("stolen-*") + glob.glob(".atoll-upload-*"):
    shutil.rmtree(left, ignore_errors=True)
print(os.listdir("/tmp/trap"))
"""
    assert fresh.printed(look) == "[]"
    fresh.assert_usable()


def test_a_slow_search_expression_delays_no_other_request(fresh: Box) -> None:
    fresh.client.put(f"{fresh.files}/a", content=b"a" * 60 + b"!")
    fresh.client.put(f"{fresh.files}/z", content=b"plain")
    started = time.monotonic()
    query: dict[str, Any] = {"query": "^(a+)+$", "regex": True}
    answer = fresh.client.get(f"{fresh.files}/search", params=query)
    assert (answer.status_code, answer.json()["code"]) == (422, "search_timeout"), answer.text
    assert 5 < time.monotonic() - started < 25
    fresh.assert_usable()


def test_user_code_that_kills_workers_harms_single_requests(fresh: Box) -> None:
    killer = """
import os, signal, time
open("ready", "w").close()
end = time.monotonic() + 3
while time.monotonic() < end:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if open(f"/proc/{pid}/comm").read() == "files\\n":
                os.kill(int(pid), signal.SIGKILL)
        except OSError:
            pass
"""
    execution = fresh.submit(killer, timeout=10)
    eventually(lambda: fresh.client.get(f"{fresh.files}/ready").status_code == 200, "the start")
    before, codes = fresh.instance, set()
    status = f"/api/v1/executions/{execution}/status"
    while fresh.client.get(status).json()["status"] in ("pending", "running"):
        answer = fresh.client.get(fresh.files, params={"recursive": True})
        codes.add(answer.status_code)
    assert codes <= {200, 422}
    fresh.assert_usable()
    assert fresh.instance == before
    assert fresh.client.get(fresh.files, params={"recursive": True}).status_code == 200


ODD = """
import os
os.makedirs("odd/closed")
open("odd/closed/f", "w").write("x")
open("odd/unreadable", "w").write("x")
os.chmod("odd/unreadable", 0)
os.chmod("odd/closed", 0)
os.mkfifo("odd/pipe")
os.symlink("odd", "odd/loop")
os.symlink("/etc/shadow", "odd/out")
here = os.getcwd()
os.makedirs("odd/deep")
os.chdir("odd/deep")
for _ in range(2000):
    os.mkdir("d")
    os.chdir("d")
"""


@pytest.mark.quick
def test_odd_trees_are_listed_packed_searched_and_refused_to_be_copied(fresh: Box) -> None:
    assert fresh.run(ODD)["status"] == "success"
    for form in ("tar", "tar.gz", "zip"):
        packed = fresh.client.get(f"{fresh.files}/odd", params={"archive": form})
        assert packed.status_code == 200
        if form != "zip":
            with tarfile.open(fileobj=io.BytesIO(packed.content)) as archive:
                names = {member.name: member for member in archive}
            assert names["out"].linkname == "/etc/shadow"
            assert "pipe" not in names
            assert len(names) < 200
    listed = fresh.client.get(fresh.files, params={"recursive": True, "limit": 1000})
    assert (listed.status_code, len(listed.json()["items"]) < 200) == (200, True)
    found = fresh.client.get(f"{fresh.files}/search", params={"query": "x"})
    assert found.status_code == 200
    body = {"source": "odd", "target": "copy"}
    copied = fresh.client.post(f"{fresh.files}/copy", json=body)
    assert (copied.status_code, copied.json()["code"]) in [(400, "bad_path"), (422, "file_denied")]
    assert [item["name"] for item in fresh.client.get(fresh.files).json()["items"]] == ["odd"]
    fresh.assert_usable()


def test_an_unread_flood_of_notices_uses_no_memory(target: Target, fresh: Box) -> None:
    flood = """
import os, time
end = time.monotonic() + 4
n = 0
while time.monotonic() < end:
    n += 1
    open("x" * 200 + str(n % 500), "w").close()
    os.unlink("x" * 200 + str(n % 500))
"""
    server, inside = resident(target.pid), resident(fresh.pid_1)
    base: dict[str, Any] = {
        "base_url": target.client.base_url, "headers": target.client.headers, "timeout": 30,
    }  # fmt: skip
    watch = f"{fresh.files}/watch?path="
    with httpx.Client(**base) as http, http.stream("GET", watch) as reader:
        lines = reader.iter_lines()
        assert next(lines) == "event: watching"
        assert fresh.run(flood)["status"] == "success"
        assert resident(target.pid) - server < 48 * MiB
        assert resident(fresh.pid_1) - inside < 16 * MiB
        fresh.client.put(f"{fresh.files}/last", content=b"x")
        # All of it, or that some was missed.
        assert any(line == "event: overflow" or '"last"' in line for line in lines)
    fresh.assert_usable()


@pytest.mark.quick
def test_no_route_serves_a_file_as_a_page(fresh: Box) -> None:
    page = b"<html><script>parent.stolen = 1</script>"
    fresh.client.put(f"{fresh.files}/page.html", content=page)
    body: dict[str, Any] = {"path": "page.html", "filename": 'a"; x="\r\nSet-Cookie: y=1'}
    link = fresh.client.post(f"{fresh.files}/presign", json=body).json()["url"]
    for url in (f"{fresh.files}/page.html", link):
        answer = fresh.client.get(url)
        assert answer.content == page
        assert answer.headers["content-disposition"].startswith("attachment;")
        assert answer.headers["content-security-policy"].startswith("sandbox")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "set-cookie" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers
