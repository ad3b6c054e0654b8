"""Images without Python, into which Atoll mounts its own interpreter."""

from __future__ import annotations

import shutil
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from atoll.drivers.docker import container_config
from atoll.drivers.shared import portable_interpreter
from tests.e2e.api import V1, Api, answer, eventually, problem, session
from tests.harness import Server
from tests.rootfs import build_image
from tests.servers.images import PYTHON, SHELL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.docker import Dockerd

STATIC, ENTRY = "atoll-test/static:1", "atoll-test/entry:1"
STATIC_PROGRAM = "ldconfig"
"""Statically linked on every machine with glibc."""


@pytest.fixture(scope="module")
def engine(dockerd: Dockerd, tmp_path_factory: pytest.TempPathFactory) -> Dockerd:
    """With an image that has only one program, and an image with an entry point."""
    directory = tmp_path_factory.mktemp("static")
    program = shutil.which(STATIC_PROGRAM, path="/usr/sbin:/sbin")
    assert program is not None
    with tarfile.open(directory / "static.tar", "w") as packed:
        packed.add(program, f"bin/{STATIC_PROGRAM}")
    dockerd.import_image(directory / "static.tar", STATIC, "ENV PATH=/bin")
    with tarfile.open(directory / "entry.tar", "w") as packed:
        packed.add(build_image(directory / "entry", python=False, tools=("bash", "echo")), ".")
    changes = ('ENTRYPOINT ["/bin/echo","hello"]', 'CMD ["world"]')
    dockerd.import_image(directory / "entry.tar", ENTRY, *changes)
    return dockerd


@pytest.fixture(scope="module", params=["directories", "volumes"])
def api(
    request: pytest.FixtureRequest, engine: Dockerd, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Api]:
    env = {
        "ATOLL_DRIVER": "docker",
        "ATOLL_DOCKER__URL": engine.url,
        "ATOLL_DOCKER__IMAGE": PYTHON,
        "ATOLL_DOCKER__STORAGE": request.param,
        "ATOLL_POOL__SIZE": "0",
    }
    directory = tmp_path_factory.mktemp("server")
    with Server(directory, "--stop-sessions", **env) as server, server.client() as http:
        api = Api(http)
        for name, image in (("shell", SHELL), ("static", STATIC), ("entry", ENTRY)):
            create(api, id=name, image=image)
        yield api


def create(api: Api, **fields: Any) -> dict[str, Any]:
    """Create a template, wait until it is ready, and return it."""
    made = answer(api.http.post(f"{V1}/templates", json={"name": "x", **fields}), 201)
    path = f"{V1}/templates/{made['id']}"
    eventually(lambda: answer(api.http.get(path))["status"] in ("ready", "failed"), 60)
    response = answer(api.http.get(path))
    assert response["status"] == "ready", response
    return response


def test_shell_and_commands_are_those_of_the_image(api: Api) -> None:
    with session(api, template_id="shell") as made:
        result = api.run(made, "echo $BASH_VERSION; cat /etc/mark", language="shell")
        assert result["stdout"].endswith("from the image"), result
        assert api.run(made, command=["uname"])["stdout"] == "Linux\n"
        lost = api.run(made, command=["perl", "-v"])
        assert (lost["exit_code"], lost["error"]["code"]) == (127, "command_not_found")


PROBE = """
import asyncio, ctypes, hashlib, json, sqlite3, ssl, subprocess, sys, threading, zlib
print(sys.executable, sys.prefix)
print(subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True).stdout)
"""


def test_an_image_without_python_runs_python_code(api: Api) -> None:
    with session(api, template_id="shell") as made:
        result = api.run(made, PROBE)
        place = "/run/atoll/python"
        assert result["stdout"] == f"{place}/bin/python3 {place}\nb'42\\n'\n", result
        # As a program, too, for shells and for scripts of packages.
        assert api.run(made, command=["python3", "-c", "print(1)"])["stdout"] == "1\n"
        result = api.run(made, "python3 -c 'import os; print(os.environ.get(\"PYTHONHOME\"))'",
                       language="shell")  # fmt: skip
        assert result["stdout"] == "None\n", result


def test_code_cannot_change_the_mounted_interpreter(api: Api) -> None:
    code = """
import os, sys
for place in (sys.executable, sys.prefix + "/lib/x", os.__file__):
    try:
        open(place, "a")
        print("OPEN", place)
    except OSError as error:
        print(error.strerror)
"""
    with session(api, template_id="shell") as made:
        printed = set(api.run(made, code)["stdout"].splitlines())
        assert printed <= {"Read-only file system", "Permission denied"}, printed


def test_a_context_keeps_its_state_on_the_mounted_interpreter(api: Api) -> None:
    with session(api, template_id="shell") as made:
        context = answer(api.http.post(f"{V1}/sessions/{made}/contexts", json={}), 201)["id"]
        api.run(made, "x = 40", context_id=context)
        assert api.run(made, "print(x + 2)", context_id=context)["stdout"] == "42\n"


def test_an_image_with_only_a_static_program_works(api: Api) -> None:
    with session(api, template_id="static") as made:
        result = api.run(made, command=[STATIC_PROGRAM, "--version"])
        assert result["stdout"].startswith("ldconfig"), result
        assert api.run(made, "import ssl; print(6 * 7)")["stdout"] == "42\n"
        api.put(made, "a.txt", b"kept")
        assert api.run(made, "print(open('a.txt').read())")["stdout"] == "kept\n"
        lost = api.run(made, "echo 1", language="shell")
        assert (lost["exit_code"], lost["error"]["code"]) == (127, "interpreter_missing")
        assert "bash or sh is not installed in this sandbox" in lost["stderr"]


def test_the_entry_point_of_an_image_can_be_run_as_a_command(api: Api) -> None:
    template = answer(api.http.get(f"{V1}/templates/entry"))
    assert (template["entrypoint"], template["command"]) == (["/bin/echo", "hello"], ["world"])
    with session(api, template_id="entry") as made:
        result = api.run(made, command=[*template["entrypoint"], *template["command"]])
        assert result["stdout"] == "hello world\n", result


def test_a_template_that_names_an_interpreter_does_not_get_another(api: Api) -> None:
    create(api, id="named", image=SHELL, python="/opt/py/bin/python3")
    refused = api.http.post(f"{V1}/sessions", json={"template_id": "named"})
    problem(refused, 422, "interpreter_missing")
    assert "/opt/py/bin/python3" in refused.json()["detail"]


def test_the_portable_interpreter_starts_under_gvisor(
    engine: Dockerd, runsc: str, tmp_path: Path
) -> None:
    directory = str(portable_interpreter.write(tmp_path))
    mount = container_config.bind(directory, portable_interpreter.TARGET, read_only=True)
    words = [*portable_interpreter.command(), "-I", "-c", "import ssl, sys; print(sys.prefix)"]
    for runtime in ("runc", runsc):
        ended = engine.run(STATIC, *words, runtime=runtime, Mounts=[mount])
        assert ended == (0, f"{portable_interpreter.TARGET}\n")
