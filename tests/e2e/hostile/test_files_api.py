"""The files API against what user code can put into a workspace, in both directions."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from tests.e2e.api import problem
from tests.e2e.hostile.host import MiB, eventually, resident

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx

    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box


def get(box: Box, path: str) -> httpx.Response:
    return box.client.get(f"{box.files}/{quote(path, safe='').replace('.', '%2E')}")


def code_of(answer: httpx.Response) -> str:
    return str(answer.json().get("code"))


OUTSIDE = ["/etc/passwd", "/run/atoll/executor.pyz", "/proc/1/environ", "/proc/self/mem", "/tmp/x",
           "/dev/zero", "/"]  # fmt: skip


def try_link(box: Box, target_path: str) -> None:
    """No request follows a link to that path, absolute or relative."""
    name = f"out-{secrets.token_hex(4)}"
    box.printed(
        f"import os\nos.symlink({target_path!r}, '{name}')\nopen('/tmp/x', 'w').write('secret')\n"
        f"os.symlink('{name}', '{name}-again')\n"
        f"os.symlink(os.path.relpath({target_path!r}, '/workspace'), '{name}-relative')"
    )
    for link in (name, f"{name}-again", f"{name}-relative"):
        answer = get(box, link)
        assert (answer.status_code, code_of(answer)) == (400, "bad_path"), answer.text
        # Through it as a directory: to read, list, write, make, move and remove.
        through = f"{link}/passwd"
        files = box.files
        for refused in (
            get(box, through),
            box.client.get(files, params={"path": link}),
            box.client.put(f"{files}/{through}", content=b"evil"),
            box.client.post(f"{files}/mkdir", json={"path": f"{link}/new"}),
            box.client.post(f"{files}/move", json={"source": through, "target": "stolen"}),
            box.client.delete(f"{files}/{through}"),
        ):
            assert refused.status_code in (400, 404, 409), refused.text
    assert box.printed("print(open('/tmp/x').read())") == "secret"


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.every_driver
@pytest.mark.parametrize("target_path", OUTSIDE)
def test_a_link_out_of_the_workspace_is_not_followed(shared: Box, target_path: str) -> None:
    try_link(shared, target_path)


def test_writing_to_a_link_replaces_the_link(shared: Box) -> None:
    shared.printed(
        "import os\nopen('/tmp/kept', 'w').write('kept')\nos.symlink('/tmp/kept', 'to-replace')"
    )
    assert shared.client.put(f"{shared.files}/to-replace", content=b"new").status_code == 201
    code = "print(open('/tmp/kept').read(), open('to-replace').read())"
    assert shared.printed(code) == "kept new"


@pytest.mark.every_driver
def test_removing_a_link_keeps_its_target(shared: Box) -> None:
    shared.printed(
        "import os\nos.mkdir('/tmp/dir')\nopen('/tmp/dir/f', 'w')\n"
        "os.symlink('/tmp/dir', 'a-link')\n"
        "os.mkdir('holder')\nos.symlink('/tmp/dir', 'holder/inner')"
    )
    recursive = {"recursive": True}
    assert shared.client.delete(f"{shared.files}/a-link", params=recursive).status_code == 204
    assert shared.client.delete(f"{shared.files}/holder", params=recursive).status_code == 204
    assert shared.printed("import os; print(os.listdir('/tmp/dir'))") == "['f']"


@pytest.mark.quick
@pytest.mark.parametrize(
    "path",
    ["..", "../x", "a/../../x", "/etc/passwd", "//etc/passwd", "/workspace/../etc/passwd",
     "./../x", "a/..", "\0", "a\0b", "/proc/self/environ", "....//x/../..", "/workspacex"],
)  # fmt: skip
def test_paths_with_parent_segments_are_refused(shared: Box, path: str) -> None:
    # Dots too, which the client would resolve before it sends them.
    encoded = quote(path, safe="").replace(".", "%2E")
    for answer in (
        shared.client.get(f"{shared.files}/{encoded}"),
        shared.client.get(f"{shared.files}/{encoded}", params={"metadata": True}),
        shared.client.put(f"{shared.files}/{encoded}", content=b"x"),
        shared.client.delete(f"{shared.files}/{encoded}"),
        shared.client.get(shared.files, params={"path": path}),
        shared.client.post(f"{shared.files}/mkdir", json={"path": path}),
        shared.client.post(f"{shared.files}/move", json={"source": path, "target": "y"}),
        shared.client.post(f"{shared.files}/upload", files={"file": (path, b"x")}),
        shared.client.post(f"{shared.files}/upload", params={"path": path}, content=b"x"),
    ):
        assert answer.status_code in (201, 400, 404, 405, 409, 422), answer.request.url
    inside = shared.printed("import os; print(os.path.exists('/x'), os.path.exists('/tmp/../x'))")
    assert inside == "False False"


def test_hard_links_stay_inside(shared: Box) -> None:
    code = """
import os
for source in ("/etc/passwd", "/usr/bin/env", "/run/atoll/executor.pyz", "/tmp/x", "/dev/null"):
    try:
        os.link(source, "hard")
        print(source)
    except OSError:
        pass
"""
    assert shared.printed(code) == ""


def test_an_upload_onto_a_hard_link_changes_only_one_name(shared: Box) -> None:
    shared.printed("import os\nopen('first', 'w').write('old')\nos.link('first', 'second')")
    shared.client.put(f"{shared.files}/second", content=b"new")
    assert (get(shared, "first").text, get(shared, "second").text) == ("old", "new")


NAMES = {
    "a newline": "a\nb",
    "a carriage return": "a\r\nSet-Cookie: x=1",
    "255 bytes": "n" * 255,
    "255 bytes of letters": "é" * 127 + "x",
    "quotes": "a\"b'c`d$(e)",
    "a backslash": "a\\b",
    "a tab and bells": "a\t\a\x1b[31m",
    "spaces": "  ",
    "right to left": "\u202egpj.exe",
    "percent": "%2e%2e%2f",
    "a question": "a?b#c&d=e",
    "dots": "...",
    "a minus": "-rf",
    "html": "<script>.html",
}


@pytest.mark.parametrize("kind", NAMES)
def test_unusual_names_can_be_uploaded_and_downloaded(shared: Box, kind: str) -> None:
    name = NAMES[kind]
    directory = f"names-{secrets.token_hex(4)}"
    url = f"{shared.files}/{quote(f'{directory}/{name}', safe='').replace('.', '%2E')}"
    assert shared.client.put(url, content=b"content").status_code == 201
    code = f"import os\nname, = os.listdir('{directory}')\nprint(ascii(name))"
    assert eval(shared.printed(code)) == name
    listed = shared.client.get(shared.files, params={"path": directory}).json()["items"]
    assert [item["name"] for item in listed] == [name]
    answer = shared.client.get(url)
    assert answer.content == b"content"
    assert "set-cookie" not in answer.headers
    assert answer.headers["x-content-type-options"] == "nosniff"
    result = shared.run(f"import sys\nopen('{directory}/' + {name!r}, 'a').write('!')")
    assert result["artifacts"] == [f"{directory}/{name}"]
    assert shared.client.get(f"/api/v1/executions/{result['execution_id']}").status_code == 200
    assert shared.client.delete(url).status_code == 204
    assert shared.printed(f"import os; print(os.listdir('{directory}'))") == "[]"


def test_an_overlong_name_is_refused(shared: Box) -> None:
    for name in ("n" * 256, "é" * 128, f"a/{'n' * 256}/b"):
        answer = shared.client.put(f"{shared.files}/{quote(name, safe='')}", content=b"x")
        assert (answer.status_code, code_of(answer)) == (400, "bad_path"), answer.text


def test_names_that_are_not_utf8_do_no_harm(shared: Box) -> None:
    result = shared.run(
        "import os\nos.makedirs(b'raw/\\xff\\xfe')\nopen(b'raw/\\xff\\xfe/\\xc3', 'w').write('x')"
    )
    assert result["status"] == "success"
    assert len(result["artifacts"]) == 1
    answer = shared.client.get(f"/api/v1/executions/{result['execution_id']}")
    assert answer.status_code == 200
    assert shared.client.get(f"{shared.url}/executions").status_code == 200
    listed = shared.client.get(shared.files, params={"path": "raw"})
    assert (listed.status_code, len(listed.json()["items"])) == (200, 1)
    gone = shared.client.delete(f"{shared.files}/raw", params={"recursive": True})
    assert gone.status_code == 204
    shared.assert_usable()


SPECIAL = {
    "a pipe": "os.mkfifo('special')",
    "a socket": "socket.socket(socket.AF_UNIX).bind('special')",
    "a directory": "os.mkdir('special')",
    "a link to itself": "os.symlink('special', 'special')",
    "a link to nothing": "os.symlink('nothing', 'special')",
    "a chain of links": "[os.symlink(f's{n + 1}', f's{n}') for n in range(3000)]\n"
    "open('s3000', 'w')\nos.symlink('s0', 'special')",
    "a closed file": "os.close(os.open('special', os.O_CREAT, 0))",
    "a file in a closed directory": "os.mkdir('c')\nopen('c/f', 'w')\n"
    "os.symlink('c/f', 'special')\nos.chmod('c', 0)",
    "a pipe behind a link": "os.mkfifo('p')\nos.symlink('p', 'special')",
}


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.every_driver
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_do_not_hang_the_api(fresh: Box, kind: str) -> None:
    before = fresh.instance
    fresh.printed(f"import os, socket\n{SPECIAL[kind]}")
    started = time.monotonic()
    answer = get(fresh, "special")
    assert answer.status_code in (400, 404, 409, 422), answer.text
    metadata = fresh.client.get(f"{fresh.files}/special", params={"metadata": True})
    assert metadata.status_code == 200
    assert fresh.client.get(fresh.files).status_code == 200
    fresh.client.get(fresh.files, params={"path": "special"})
    fresh.client.post(f"{fresh.files}/mkdir", json={"path": "special/x"})
    fresh.client.put(f"{fresh.files}/special", content=b"x")
    fresh.client.delete(f"{fresh.files}/special", params={"recursive": True})
    assert time.monotonic() - started < 25
    fresh.assert_usable()
    assert fresh.instance == before


def test_pipes_at_the_paths_of_uploads_do_not_block_them(fresh: Box) -> None:
    fresh.printed("import os\nfor n in range(300): os.mkfifo(f'.atoll-upload-{n}')")
    assert fresh.client.put(f"{fresh.files}/up.txt", content=b"up").status_code == 201
    assert get(fresh, "up.txt").text == "up"
    fresh.assert_usable()


def test_a_link_swapped_during_a_request_never_leads_outside(target: Target, fresh: Box) -> None:
    """The race that a check before the use would lose."""
    swap = """
import ctypes, os
open("/tmp/secret", "w").write("secret")
os.makedirs("inside", exist_ok=True)
open("inside/secret", "w").write("inside")
os.makedirs("/tmp/out", exist_ok=True)
open("/tmp/out/secret", "w").write("secret")
os.symlink("/tmp/out", "link")
os.rename("inside", "way")
libc = ctypes.CDLL(None)
print("ready", flush=True)
while not os.path.exists("stop"):
    for _ in range(100):
        libc.renameat2(-100, b"way", -100, b"link", 2)  # RENAME_EXCHANGE
        libc.renameat2(-100, b"way", -100, b"link", 2)
"""
    execution = fresh.submit(swap, timeout=200)
    eventually(lambda: get(fresh, "way/secret").status_code == 200, "the first read")
    answers: dict[str, int] = {}
    begun, rounds = time.monotonic(), 0
    while (past := time.monotonic() - begun) < 4 or rounds < 20 or not answers.get("read"):
        assert past < 60, answers
        rounds += 1
        answer = get(fresh, "way/secret")
        kind = "read" if answer.status_code == 200 else code_of(answer)
        answers[kind] = answers.get(kind, 0) + 1
        if kind == "read":
            assert answer.text == "inside"
        fresh.client.put(f"{fresh.files}/way/written", content=b"x")
        fresh.client.get(fresh.files, params={"path": "way"})
    assert fresh.client.put(f"{fresh.files}/stop", content=b"").status_code == 201
    assert fresh.result(execution)["status"] == "success"
    # Caught by the first look, or by the second when it was swapped in between.
    assert set(answers) <= {"read", "bad_path", "not_directory", "file_not_found"}
    assert fresh.printed("import os; print(os.listdir('/tmp/out'))") == "['secret']"


def test_a_tree_that_grows_during_its_removal_does_not_block_the_api(fresh: Box) -> None:
    grow = """
import os, time
end = time.monotonic() + 3
n = 0
while time.monotonic() < end:
    n += 1
    try:
        os.makedirs(f"grow/{n % 50}/x", exist_ok=True)
        for trash in os.listdir("."):
            if trash.startswith(".atoll-trash"):
                os.makedirs(f"{trash}/0/{n % 300}/y", exist_ok=True)
    except OSError:
        pass
"""
    execution = fresh.submit(grow, timeout=20)
    for _ in range(5):
        started = time.monotonic()
        fresh.client.delete(f"{fresh.files}/grow", params={"recursive": True})
        assert time.monotonic() - started < 25
    result = fresh.result(execution)
    assert result["status"] == "success", result
    fresh.assert_usable()


DEEP = """
import os
os.mkdir("deep")
os.chdir("deep")
for _ in range(10_000):
    os.mkdir("d")
    os.chdir("d")
open("bottom", "w").close()
"""


def test_a_tree_ten_thousand_deep_is_removed_by_the_api(boxes: Callable[..., Box]) -> None:
    fresh = boxes()
    before = fresh.instance
    assert fresh.run(DEEP)["status"] == "success"
    inside = resident(fresh.pid_1)
    gone = fresh.client.delete(f"{fresh.files}/deep", params={"recursive": True})
    if gone.status_code != 204:
        # It took longer than a removal may; its name is gone, and the rest goes with the next.
        problem(gone, 409, "not_empty")
    assert fresh.client.get(fresh.files).json()["items"] == []

    def is_empty() -> bool:
        fresh.client.put(f"{fresh.files}/next/f", content=b"")
        fresh.client.delete(f"{fresh.files}/next", params={"recursive": True})
        left = fresh.run("import os; print(any('trash' in name for name in os.listdir()))")
        return bool(left["stdout"] == "False\n")

    eventually(is_empty, "an empty workspace", 120)
    assert resident(fresh.pid_1) - inside < 8 * MiB
    fresh.assert_usable()
    assert fresh.instance == before


CLOSED = """
import os
os.makedirs("closed/a/b/c")
open("closed/a/b/c/f", "w").close()
open("closed/a/f", "w").close()
for path in ("closed/a/b/c", "closed/a/b", "closed/a", "closed"):
    os.chmod(path, 0)
"""


def test_closed_directories_are_removed_by_the_api(fresh: Box) -> None:
    assert fresh.run(CLOSED)["status"] == "success"
    gone = fresh.client.delete(f"{fresh.files}/closed", params={"recursive": True})
    assert gone.status_code == 204, gone.text
    assert fresh.client.get(fresh.files).json()["items"] == []


@pytest.mark.parametrize("code", [DEEP, CLOSED], ids=["deep", "closed"])
def test_a_workspace_with_any_content_is_removed_with_its_session(
    target: Target, boxes: Callable[..., Box], code: str
) -> None:
    box = boxes()
    assert box.run(code)["status"] == "success"
    place = box.workspace
    assert place.exists()
    target.client.delete(box.url)
    eventually(lambda: not place.exists(), "the end of the workspace")


@pytest.mark.every_driver
def test_a_huge_directory_is_listed_in_pages(target: Target, boxes: Callable[..., Box]) -> None:
    box = boxes(disk="512Mi")
    count = 30_000
    made = box.run(
        f"import os\nos.mkdir('many')\n"
        f"for n in range({count}):\n    open(f'many/{{n:06}}', 'w').close()",
        timeout=45,
    )
    assert made["status"] == "success", made
    assert made["artifacts_truncated"] is True
    assert len(made["artifacts"]) == 1000
    seen: list[str] = []
    cursor, slowest = None, 0.0
    while True:
        params = {"path": "many", "limit": "1000"} | ({"cursor": cursor} if cursor else {})
        started = time.monotonic()
        page = box.client.get(box.files, params=params).json()
        slowest = max(slowest, time.monotonic() - started)
        seen += [item["name"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == [f"{n:06}" for n in range(count)]
    assert slowest < 15

    def gone() -> bool:
        answer = box.client.delete(f"{box.files}/many", params={"recursive": True})
        if answer.status_code not in (204, 404):
            # It took longer than a removal may.
            problem(answer, 409, "not_empty")
        return answer.is_success or answer.status_code == 404

    eventually(gone, "the end of the directory")
    assert box.client.get(box.files).json()["items"] == []


def test_a_file_that_changes_during_a_download_aborts_the_download(fresh: Box) -> None:
    code = """
import os, time
with open("moving", "wb") as file:
    end = time.monotonic() + 3
    while time.monotonic() < end:
        file.truncate(24 << 20)
        file.truncate(1000)
"""
    execution = fresh.submit(code, timeout=10)
    eventually(lambda: get_status(fresh) == 200, "the file")
    for _ in range(30):
        get_status(fresh)
    assert fresh.result(execution)["status"] == "success"
    fresh.assert_usable()


def get_status(box: Box) -> int:
    """Read the complete response as far as possible; an aborted connection is reported too."""
    import httpx

    try:
        return get(box, "moving").status_code
    except httpx.RemoteProtocolError:
        return 0


@pytest.fixture
def host_file() -> Iterator[Path]:
    path = Path("/var/tmp") / f"atoll-{secrets.token_hex(8)}"
    path.write_text("the host's")
    yield path
    path.unlink()


def test_the_files_api_serves_no_path_of_the_host(shared: Box, host_file: Path) -> None:
    for path in (str(host_file), f"/workspace/../..{host_file}", f"file://{host_file}"):
        answer = get(shared, path)
        assert answer.status_code in (400, 404), answer.text
        assert "the host's" not in answer.text
    shared.printed(f"import os\nos.symlink('{host_file}', 'to-host')")
    assert get(shared, "to-host").status_code == 400
    assert host_file.read_text() == "the host's"
