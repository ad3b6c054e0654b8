"""The socket that code talks to the outside by, and its staging area, in hostile hands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.hostile.host import MiB, eventually, resident

if TYPE_CHECKING:
    from tests.e2e.hostile.host import Box

pytestmark = pytest.mark.every_driver

CONNECT = """
import socket, os, time
def connect():
    peer = socket.socket(socket.AF_UNIX)
    peer.connect('\\0atoll')
    return peer
"""

FLOODS = {
    "connections that say nothing": "peers = []\nwhile True: peers.append(connect())",
    "connections that go at once": "while True: connect().close()",
    "garbage": "while True:\n    try: connect().sendall(os.urandom(100_000))\n"
    "    except OSError: pass",
    "a line without an end": "while True:\n    peer = connect()\n    try:\n"
    "        while True: peer.sendall(b'x' * 65536)\n    except OSError: pass",
    "questions": "import atoll_session\nwhile True:\n"
    "    try: atoll_session.ask('x' * 60_000, timeout=0)\n"
    "    except atoll_session.Unavailable: pass",
    "many processes": "for _ in range(20): os.fork()\nwhile True:\n"
    "    try: connect()\n    except OSError: pass",
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_stays_in_its_own_execution(fresh: Box, flood: str) -> None:
    fresh.printed("print(1)")
    before = resident(fresh.pid_1)

    result = fresh.run(CONNECT + flood, timeout=2)

    assert result["status"] in ("timeout", "failed")
    assert resident(fresh.pid_1) - before < 24 * MiB
    fresh.assert_usable()
    assert fresh.printed("import atoll_session; print(atoll_session.messages())") == "[]"


@pytest.mark.quick
def test_the_name_of_the_socket_cannot_be_bound(fresh: Box) -> None:
    code = (
        "import socket\n"
        "try: socket.socket(socket.AF_UNIX).bind('\\0atoll')\n"
        "except OSError as error: print(error.strerror)"
    )
    assert fresh.printed(code) == "Address already in use"


@pytest.mark.quick
def test_a_background_process_cannot_send_requests_of_an_execution(fresh: Box) -> None:
    code = (
        "import atoll_session, os\n"
        "if os.fork() == 0:\n"
        "    os.closerange(0, 3)\n"
        "    while os.getppid() != 1: pass\n"
        "    try: atoll_session.ask('May I?')\n"
        "    except atoll_session.Unavailable as error: said = error.code\n"
        "    open('said', 'w').write(said)\n"
        "    os._exit(0)\n"
    )
    fresh.printed(code)

    def reply_file() -> str:
        answer = fresh.client.get(f"{fresh.files}/said")
        return answer.text if answer.status_code == 200 else ""

    assert eventually(reply_file, "what it was told") == "no_execution"


def test_staged_files_that_change_while_they_are_moved_do_no_harm(fresh: Box) -> None:
    code = (
        "import os, random\n"
        "here = os.environ['ATOLL_STAGING']\n"
        "for n in range(3000): open(f'{here}/{n}', 'w').close()\n"
        "if os.fork() == 0:\n"
        "    os.closerange(0, 3)\n"
        "    for n in range(20_000):\n"
        "        name = f'{here}/{n % 3000}'\n"
        "        try:\n"
        "            os.unlink(name); os.symlink('/etc', name)\n"
        "            os.mkdir(f'{here}/new{n}')\n"
        "            os.rename(here, here + 'x'); os.rename(here + 'x', here)\n"
        "        except OSError: pass\n"
        "    os._exit(0)\n"
    )
    result = fresh.run(code)
    assert result["status"] in ("success", "failed"), result
    fresh.assert_usable()


def test_staged_files_without_permissions_are_removed(fresh: Box) -> None:
    code = (
        "import os\n"
        "here = os.environ['ATOLL_STAGING']\n"
        "os.mkdir(here + '/closed'); open(here + '/closed/f', 'w').close()\n"
        "os.chmod(here + '/closed', 0o500); os.chmod(here, 0); os.chmod('.tmp', 0)\n"
    )
    assert fresh.run(code)["artifacts"] == ["closed/f"]
    assert fresh.run(code + "raise SystemExit(1)")["artifacts"] == []
    assert fresh.printed("import os; print(len(os.listdir('.tmp')))") == "1"
    fresh.assert_usable()


def test_the_space_of_staged_files_in_a_full_workspace_is_freed(fresh: Box) -> None:
    code = (
        "import os\n"
        "file = open(os.environ['ATOLL_STAGING'] + '/big', 'wb')\n"
        "while True: file.write(bytes(1 << 20)); file.flush()\n"
    )
    assert fresh.run(code)["status"] == "failed"
    fresh.assert_usable()
    assert fresh.printed("open('fits', 'wb').write(bytes(20 << 20)); print(1)") == "1"
