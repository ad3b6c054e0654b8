"""Hostile archives: none writes outside, hangs, or exceeds its limits."""

from __future__ import annotations

import gzip
import io
import json
import socket
import stat
import struct
import tarfile
import zipfile
import zlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.hostile.conftest import either_variant
from tests.e2e.hostile.host import MiB, eventually, peak, resident

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box

pytestmark = either_variant

BLOCK = 512
END = bytes(2 * BLOCK)


def head(name: str, kind: bytes = b"0", size: int = 0, link: str = "") -> bytes:
    """One tar header with the given fields."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, link
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def file(name: str, content: bytes = b"x", **options: Any) -> bytes:
    return head(name, size=len(content), **options) + content + bytes(-len(content) % BLOCK)


def pax(records: dict[str, str], kind: bytes = b"x") -> bytes:
    """A header that changes the next entry, or with `g` all of them."""
    text = b""
    for name, value in records.items():
        rest = f" {name}={value}\n".encode()
        length = len(rest) + 1
        while len(str(length)) + len(rest) != length:
            length += 1
        text += str(length).encode() + rest
    return head("pax", kind, len(text)) + text + bytes(-len(text) % BLOCK)


def zipped(*entries: tuple[str, bytes, int], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content, mode in entries:
            info = zipfile.ZipInfo(name)
            info.compress_type, info.external_attr, info.create_system = method, mode << 16, 3
            archive.writestr(info, content)
    return out.getvalue()


def overlapping() -> bytes:
    """Many names in the list of a zip for one and the same bytes: a small file, gigabytes out."""
    content = bytes(16 * MiB)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(content) + packer.flush()
    fields = (zlib.crc32(content), len(packed), len(content), 1, 0)
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 8, 0, 33, *fields) + b"a" + packed
    listed = b"".join(
        struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 8, 0, 33, *fields, 0, 0, 0, 0, 0) + b"a"
        for _ in range(2000)
    )
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2000, 2000, len(listed), len(local), 0)
    return local + listed + end


def endless_list() -> bytes:
    """A zip whose list has half a million names."""
    one = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 0, 0, 33, *[0] * 3, 1, *[0] * 6) + b"a"
    listed = one * 500_000
    count = 500_000
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(listed), 0)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(listed), 1)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    return listed + end64 + locator + end


def lzma_dictionary() -> bytes:
    """A zip entry that asks for four gigabytes of dictionary."""
    data = bytearray(zipped(("a", b"x" * 100, 0o644), method=zipfile.ZIP_LZMA))
    at = data.index(b"\x05\x00", 30)  # the length of the properties; then these, and the size
    data[at + 3 : at + 7] = b"\xff\xff\xff\xff"
    return bytes(data)


LINK = stat.S_IFLNK | 0o777
TARS: dict[str, Callable[[], bytes]] = {
    "leads up": lambda: file("a/../../../etc/x"),
    "absolute": lambda: file("/etc/x"),
    "our own name": lambda: file(".atoll-upload-0/x"),
    "pax path leads up": lambda: pax({"path": "../../x"}) + file("a"),
    "global pax path": lambda: pax({"path": "../../x"}, b"g") + file("a"),
    "pax size without end": lambda: pax({"size": str(2**62)}) + file("a"),
    "pax size is negative": lambda: pax({"size": "-1"}) + file("a") + file("b"),
    "pax header of gigabytes": lambda: head("pax", b"x", 2**33),
    "pax header that inflates": lambda: gzip.compress(head("p", b"x", 2**28) + bytes(2**28), 1),
    "long name of gigabytes": lambda: head("l", b"L", 2**34) + bytes(BLOCK),
    "long name that inflates": lambda: gzip.compress(head("l", b"L", 2**28) + b"a" * 2**28, 1),
    "headers of headers": lambda: b"".join(pax({"comment": "x"}) for _ in range(20_000)),
    "long names of long names": lambda: (head("l", b"L", 3) + b"abc".ljust(BLOCK)) * 5000,
    "old sparse": lambda: head("s", b"S", 0) + bytes(BLOCK),
    "sparse by pax": lambda: pax(
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(2**50)}
    ) + file("s", b"1\n0\n1\n".ljust(BLOCK)),
    "sparse map without end": lambda: pax(
        {"GNU.sparse.map": ",".join(["0,1"] * 200_000), "GNU.sparse.size": str(2**50)}
    ) + file("s"),
    "through a link": lambda: head("a", b"2", link="/tmp") + file("a/x"),
    "through a link up": lambda: head("a", b"2", link="../..") + file("a/x"),
    "hard link up": lambda: head("a", b"1", link="../../etc/passwd"),
    "hard link absolute": lambda: head("a", b"1", link="/etc/passwd"),
    "hard link to a link": lambda: (
        head("a", b"2", link="/etc/passwd") + head("b", b"1", link="a")
    ),
    "hard link to a neighbour": lambda: head("b", b"1", link="kept"),
    "a device": lambda: head("a", b"3"),
    "a pipe": lambda: head("a", b"6"),
    "unknown kind": lambda: head("a", b"Z"),
    "file is a directory": lambda: file("a") + file("a/b"),
    "directory is a file": lambda: file("a/b") + file("a"),
    "5,000 levels": lambda: pax({"path": "d/" * 5000 + "f"}) + file("a"),
    "name of 300": lambda: pax({"path": "n" * 300}) + file("a"),
    "NUL": lambda: pax({"path": "a\0b"}) + file("a"),
    "cut off": lambda: file("a", bytes(9000))[:5000],
    "wrong checksum in gzip": lambda: gzip.compress(file("a") + END)[:-8] + b"12345678",
    "zeros without end in gzip": lambda: gzip.compress(file("a") + bytes(2**26), 1),
    "cut off in gzip": lambda: gzip.compress(file("a", bytes(9000)) + END)[:-20],
    "half a header": lambda: file("a") + head("b")[:100],
    "no checksum": lambda: file("a") + b"garbage".ljust(BLOCK) + END,
    "bzip2": lambda: b"BZh91AY&SY" + bytes(2000),
    "nothing": lambda: b"",
}  # fmt: skip
ZIPS: dict[str, Callable[[], bytes]] = {
    "leads up": lambda: zipped(("../../x", b"x", 0o644)),
    "absolute": lambda: zipped(("/etc/x", b"x", 0o644)),
    "through a link": lambda: zipped(("a", b"/tmp", LINK), ("a/x", b"x", 0o644)),
    "link of megabytes": lambda: zipped(("a", b"l" * MiB, LINK)),
    "link with a NUL": lambda: zipped(("a", b"l\0m", LINK)),
    "file is a directory": lambda: zipped(("a", b"", 0o644), ("a/b", b"", 0o644)),
    "overlapping": overlapping,
    "half a million names": endless_list,
    "dictionary of gigabytes": lzma_dictionary,
    "wrong checksum": lambda: zipped(("a", b"xxxx", 0o644), method=0).replace(b"xxxx", b"yyyy"),
    "cut off": lambda: zipped(("a", bytes(9000), 0o644))[:-30],
    "nothing": lambda: b"",
}
REFUSED = {"bad_archive", "too_large", "disk_full", "file_exists", "bad_path", "too_many_entries"}
HARMLESS = {"pax size is negative", "nothing"}
"""What may be taken: by some Python it is an archive, of nothing that could harm."""


@pytest.fixture(scope="module")
def box(target: Target) -> Iterator[Box]:
    box = target.box(memory="256Mi", disk="32Mi")
    box.client.put(f"{box.files}/d/kept", content=b"kept")
    box.run("open('/tmp/before', 'w')")
    yield box
    target.client.delete(box.url)


def all_files(box: Box) -> list[Any]:
    """What there is in the workspace and beside it."""
    code = (
        "import json, os\n"
        "found = [sorted(os.listdir(p)) for p in ('/', '/workspace', '/workspace/d', '/tmp')]\n"
        "print(json.dumps([found, open('d/kept').read(), os.stat('d/kept').st_nlink]))"
    )
    found: list[Any] = json.loads(box.printed(code))
    return found


@pytest.mark.parametrize("form", ["tar", "zip"])
@pytest.mark.quick
def test_a_hostile_archive_is_refused_and_leaves_nothing(
    target: Target, box: Box, form: str
) -> None:
    cases = TARS if form == "tar" else ZIPS
    for made in ("a", "b"):
        box.client.delete(f"{box.files}/d/{made}")
    before, instance = all_files(box), box.instance
    inside, server = resident(box.pid_1), peak(target.pid)
    answers = {}
    for name, make in cases.items():
        data = make()
        put = box.client.put(
            f"{box.files}/d",
            params={"archive": form},
            content=data if data[:1] == b"\x1f" else data + END,
            timeout=120,
        )
        answers[name] = (put.status_code, put.json().get("code"))
        if name in HARMLESS:
            for made in ("a", "b"):
                box.client.delete(f"{box.files}/d/{made}")
        assert all_files(box) == before, name
    wrong = {
        name: text
        for name, text in answers.items()
        if text[1] not in REFUSED and not (text[0] < 300 and name in HARMLESS)
    }
    assert not wrong
    assert resident(box.pid_1) - inside < 16 * MiB
    assert peak(target.pid) - server < 64 * MiB
    assert box.instance == instance
    box.assert_usable()


@pytest.mark.parametrize(
    "announced", [pytest.param(10, marks=pytest.mark.every_driver), 10_000_000]
)
def test_an_archive_shorter_than_its_content_length_leaves_no_files(
    target: Target, box: Box, announced: int
) -> None:
    before = all_files(box)
    left: list[Any] = []

    def nothing_new() -> bool:
        # Leftovers of another case may have been removed by now.
        left[:] = all_files(box)
        names, *content = left
        return content == before[1:] and all(map(set.issuperset, map(set, before[0]), names))

    body = file("late", bytes(4000)) + END
    where = urlsplit(target.server.url)
    with socket.create_connection((where.hostname, where.port), timeout=30) as line:
        line.sendall(
            f"PUT {box.files}/d?archive=tar HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {target.server.key}\r\n"
            f"Content-Length: {announced}\r\n\r\n".encode()
            + body
        )
        line.shutdown(socket.SHUT_WR)
        while line.recv(65536):
            pass
    eventually(nothing_new, lambda: f"the removal of what was half unpacked: {left}, {before}")
    box.assert_usable()
