"""What code leaves in its home directory runs in its own processes and in no others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import drivers
from tests.e2e.api import V1, answer, eventually
from tests.e2e.hostile.conftest import VARIANTS, attackable
from tests.servers.index import Index

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box

pytestmark = pytest.mark.every_driver

SETTINGS = ("~/.trusting", "$XDG_CACHE_HOME/trusting", "$MPLCONFIGDIR/trusting", "trusting.cfg")
"""What the package of the test runs as code when it is imported."""
TRUSTING = f"""
import os
for name in {SETTINGS!r}:
    place = os.path.expandvars(os.path.expanduser(name))
    if os.path.exists(place):
        exec(open(place).read())
"""
TRAP = """
import os as _os
with open("/workspace/ran", "a") as _file:
    print(_os.getpid(), _os.getppid(), file=_file)
"""
LEAVE = f"""
import os, site
places = ["sitecustomize.py", "usercustomize.py", "json.py", "hashlib.py", "tarfile.py"]
below = site.getusersitepackages()
places += [*(below + "/" + name for name in list(places)), *{SETTINGS!r}]
places = [os.path.expandvars(os.path.expanduser(name)) for name in places]
for place in places:
    os.makedirs(os.path.dirname(place) or ".", exist_ok=True)
    open(place, "w").write({TRAP!r})
open(below + "/trap.pth", "w").write("import sys; exec(%r)\\n" % {TRAP!r})
for name in (".profile", ".bash_profile", ".bashrc"):
    open(os.path.expanduser("~/" + name), "w").write("echo $$ $PPID >> /workspace/ran\\n")
"""


@pytest.fixture(scope="module")
def target(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Index() as index:
        index.add("trusting", files={"trusting.py": TRUSTING})
        settings = {
            "ATOLL_PACKAGES__INDEX_URL": index.url,
            "ATOLL_LOCAL__TEMPLATE_ROOTS": sys.base_prefix,
            "ATOLL_POOL__SIZE": "0",
        }
        with attackable(VARIANTS[0], tmp_path_factory.mktemp("home"), **settings) as target:
            yield target


@pytest.fixture
def box(target: Target) -> Iterator[Box]:
    """Of a template with hooks and with a module that loads files from its home directory."""
    template = {
        "id": "trusting",
        "name": "Trusting",
        "python_packages": ["trusting"],
        "preload": ["trusting"],
    }
    if drivers.CHOSEN == "local":
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        template["python"] = str(Path(sys.base_prefix).resolve() / "bin" / version)
    answer(target.client.post(f"{V1}/templates", json=template), 201)
    eventually(lambda: target.client.get(f"{V1}/templates/trusting").json()["status"] == "ready")
    made = target.box(template_id="trusting")
    yield made
    target.client.delete(made.url)


def ran(box: Box) -> list[tuple[int, int]]:
    """Pid and parent of every process that ran what was left."""
    found = box.client.get(f"{box.files}/ran")
    lines = found.text.splitlines() if found.is_success else []
    return [(int(pid), int(parent)) for pid, parent in map(str.split, lines)]


@pytest.mark.quick
def test_files_in_home_are_not_run_by_processes_of_the_executor(target: Target, box: Box) -> None:
    assert "trusting" in box.printed("import sys\nprint(*sys.modules)")
    box.printed(LEAVE)
    # Another zygote in this instance, then another instance with these files.
    box.run("import os\nos.kill(os.getppid(), 9)")
    assert box.printed("import trusting, os\nprint(os.environ['HOME'])") == "/workspace"
    answer(box.client.post(f"{box.url}/stop"))
    assert box.printed("import trusting\nprint('again')") == "again"
    # Their own processes: archives, searches, copies.
    for asked in ("/.local?archive=zip", "/search?query=import", "?recursive=true"):
        assert box.client.get(f"{box.files}{asked}").is_success, asked

    assert ran(box) == []
    # They are no duds.
    box.printed("python3 -c pass; bash -lc true", language="shell")
    assert len(ran(box)) >= 2
    assert all(pid != 1 and parent != 1 for pid, parent in ran(box))
    box.assert_usable()
    other = target.box(template_id="trusting")
    assert other.printed("python3 -c pass; ls -A", language="shell") == ".tmp"
    target.client.delete(other.url)
