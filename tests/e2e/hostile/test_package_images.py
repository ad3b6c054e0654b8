"""Images that attack the installation of packages, and through it the sessions of other images."""

from __future__ import annotations

import os
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

from atoll.drivers.shared.packages.installation import uv_binary
from tests.e2e.hostile.conftest import VARIANTS, attackable
from tests.rootfs import build_rootfs, put_libraries
from tests.servers.index import Index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx

    from tests.e2e.hostile.conftest import Target

Hostile: TypeAlias = "Callable[[str, str], None]"
TEMPLATES = "/api/v1/templates"

AT_ITS_ANSWER = """
_dumps = dumps
def dumps(found, *arguments, **about):
    import os, sys
    if sys.argv[0].endswith("install.py") and isinstance(found, dict):
        if "packages" in found:
            found = described(found)
        elif "installed" in found or "error" in found:
            found = installed(found)
    return found if isinstance(found, str) else _dumps(found, *arguments, **about)
def described(found):
    return found
def installed(found):
    return found
"""
"""What a hostile image has in its module `json`, which the program of an installation imports."""


@pytest.fixture(scope="module")
def index() -> Iterator[Index]:
    with Index() as running:
        yield running.add("plain", "1.0", scripts={"say-plain": "plain:main"})


@pytest.fixture(scope="module")
def target(
    bubblewrap: str, index: Index, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    """A server with the image of a victim."""
    directory = tmp_path_factory.mktemp("images")
    with attackable(VARIANTS[0], directory, ATOLL_PACKAGES__INDEX_URL=index.url) as found:
        found.client.timeout = 120
        (found.server.data_dir / "rootfs").mkdir(exist_ok=True)
        victim = build_rootfs(found.server.data_dir / "rootfs" / "victim")
        uv = uv_binary()
        assert uv is not None
        put_libraries(victim, uv)
        make(found, "victim")
        yield found


def make(target: Target, name: str) -> None:
    image = target.server.data_dir / "rootfs" / name
    body = {"id": name, "name": name, "image": str(image)}
    answer = target.client.post(TEMPLATES, json=body)
    assert answer.status_code == 201, answer.text


@pytest.fixture
def hostile(target: Target) -> Iterator[Hostile]:
    """Templates whose images are the victim's, with code of an attacker in the interpreter."""
    made: list[Path] = []

    def build(name: str, code: str) -> None:
        roots = target.server.data_dir / "rootfs"
        image = roots / name
        shutil.copytree(roots / "victim", image, symlinks=True, copy_function=os.link)
        [module] = image.glob("usr/local/lib/python3*/json/__init__.py")
        text = module.read_text()
        module.unlink()
        module.write_text(text + AT_ITS_ANSWER + textwrap.dedent(code))
        made.append(image)
        make(target, name)

    yield build
    for image in made:
        target.client.delete(f"{TEMPLATES}/{image.name}")
        shutil.rmtree(image)


def create(target: Target, template: str, *names: str) -> httpx.Response:
    body = {
        "template_id": template,
        "dependencies": [{"name": name} for name in names or ("plain",)],
        "install_timeout": 60,
    }
    return target.client.post("/api/v1/sessions", json=body)


def failed(target: Target, template: str) -> str:
    """Why the packages of a session could not be installed, which is final for the session."""
    response = create(target, template)
    assert response.status_code == 422, response.text
    problem = response.json()
    assert problem["code"] == "dependency_failed"
    if "session_id" in problem:
        session = target.client.get(f"/api/v1/sessions/{problem['session_id']}").json()
        assert session["status"] == "failed"
    assert list((target.server.data_dir / "node" / "installs").iterdir()) == []
    return str(problem["detail"])


@pytest.mark.quick
def test_a_faked_installation_does_not_affect_another_image(
    target: Target, hostile: Hostile
) -> None:
    """It describes the interpreter of the victim, and answers the installer with its own files."""
    hostile(
        "fakes",
        """
        def installed(found):
            os.makedirs("/build/target/plain-1.0.dist-info", exist_ok=True)
            for name, text in (
                ("plain.py", "version = 'POISON'"),
                ("plain-1.0.dist-info/METADATA", "Name: plain\\nVersion: 1.0\\n"),
                ("plain-1.0.dist-info/RECORD", ""),
            ):
                if os.path.exists("/build/target/" + name):
                    os.unlink("/build/target/" + name)
                with open("/build/target/" + name, "w") as file:
                    file.write(text)
            return {"installed": ["plain==1.0"], "own": True}
        import os
        """,
    )
    assert create(target, "fakes").status_code == 422

    box = target.box(template_id="victim", dependencies=[{"name": "plain"}])
    assert box.run("import plain; print(plain.version)")["stdout"] == "1.0\n"
    target.client.delete(box.url)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "changes",
            "open('/build/target/plain.py', 'a').write('#')",
            "differs from the file in its wheel",
        ),
        ("nests", "[(os.mkdir('d'), os.chdir('d')) for _ in range(900)]", "deeper than"),
    ],
)
def test_a_wheel_modified_by_an_image_is_refused(
    target: Target, hostile: Hostile, name: str, change: str, words: str
) -> None:
    code = f"import os\ndef installed(found):\n    os.chdir('/build/target')\n    {change}\n"
    hostile(name, code + "    return found\n")
    assert words in failed(target, name)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("describes", 'def described(found):\n    return "[" * 200_000'),
        ("answers", 'def installed(found):\n    return "[" * 200_000'),
        ("exits", "import sys, os\nif sys.argv[0].endswith('install.py'): os._exit(3)"),
        ("errs", 'def installed(found):\n    return {"error": {"a": "\\ud800 \\0"}}'),
    ],
)
def test_a_malformed_answer_is_a_permanent_error(
    target: Target, hostile: Hostile, name: str, code: str
) -> None:
    hostile(name, code)
    assert failed(target, name)
