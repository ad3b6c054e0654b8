"""Home, caches, fonts and installers in a sandbox that has no network."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests import drivers
from tests.e2e.api import V1, Api, answer, sh
from tests.missing import missing
from tests.servers.index import wheel

MINE, PACKED, _ = wheel("mine")
PIPS = {"pip": ["pip"], "pip3": ["pip3"], "python -m pip": ["python3", "-m", "pip"]}
local = pytest.mark.skipif(drivers.CHOSEN != "local", reason="the image has no pip and no fonts")


def shell(api: Api, session: str, line: str, **fields: Any) -> dict[str, Any]:
    return api.run(session, line, language="shell", timeout=60, wait=60, **fields)


@pytest.fixture
def pip(api: Api, session: str) -> str:
    """A session that has pip."""
    if shell(api, session, "pip --version && pip3 --version")["exit_code"] != 0:
        missing("the interpreter that runs the tests has no pip")
    return session


# Home


@pytest.mark.quick
@pytest.mark.every_driver
def test_home_is_the_workspace_and_outlives_the_instance(api: Api) -> None:
    session = str(api.create()["id"])
    assert sh(api, session, "echo $HOME; cd; pwd; echo kept > ~/.note") == "/workspace\n" * 2
    answer(api.http.post(f"{V1}/sessions/{session}/stop"))
    code = "import pathlib\nprint((pathlib.Path.home() / '.note').read_text())"
    assert api.run(session, code)["stdout"] == "kept\n\n"
    assert api.names(session) == [".note"]
    api.end(session)


@local
@pytest.mark.quick
def test_the_home_in_the_user_database_is_the_workspace(api: Api, session: str) -> None:
    code = "import os, pwd\nprint(pwd.getpwuid(os.getuid()).pw_dir)"
    assert api.run(session, code)["stdout"] == "/workspace\n"


@pytest.mark.quick
@pytest.mark.every_driver
def test_caches_are_not_stored_in_the_workspace(api: Api, session: str) -> None:
    result = shell(api, session, 'mkdir -p "$XDG_CACHE_HOME"; echo x > "$XDG_CACHE_HOME/cached"')
    assert (result["exit_code"], result["artifacts"]) == (0, [])
    assert sh(api, session, "cat /tmp/.cache/cached") == "x\n"
    assert api.names(session) == []


@pytest.mark.quick
def test_a_home_set_by_the_user_is_used(api: Api, session: str) -> None:
    assert shell(api, session, "echo ~", env={"HOME": "/workspace/me"})["stdout"] == (
        "/workspace/me\n"
    )


# Fonts


@local
@pytest.mark.quick
def test_fontconfig_finds_its_settings(api: Api, session: str) -> None:
    assert "<fontconfig>" in sh(api, session, "cat /etc/fonts/fonts.conf")
    if shutil.which("fc-list") is not None:
        result = shell(api, session, "fc-list")
        assert (result["exit_code"], result["stderr"]) == (0, "")


# Installers


@pytest.mark.quick
@pytest.mark.every_driver
def test_installers_are_configured_for_no_network(api: Api, session: str) -> None:
    names = "PIP_INDEX_URL", "PIP_RETRIES", "PIP_BREAK_SYSTEM_PACKAGES", "UV_OFFLINE"
    output = sh(api, session, f"echo ${' $'.join(names)} $npm_config_offline")
    assert output.startswith("none: this sandbox has no network.")
    assert output.endswith(" 0 1 1 true\n")


@local
@pytest.mark.quick
@pytest.mark.parametrize("program", PIPS.values(), ids=PIPS)
def test_pip_reports_at_once_that_the_network_is_missing(
    api: Api, pip: str, program: list[str]
) -> None:
    result = api.run(pip, command=[*program, "install", "no-such-package"], wait=60)

    assert result["exit_code"] == 1
    for text in (result["stdout"], result["stderr"]):
        assert "this sandbox has no network" in text
        assert "`atoll session install`" in text
    assert (
        "Retrying" not in result["stderr"]
    )  # Which takes 7.5 s; it takes what pip takes to start.


@local
def test_pip_installs_files_that_all_code_of_the_session_finds(api: Api, pip: str) -> None:
    api.put(pip, MINE, PACKED)
    context = answer(api.http.post(f"{V1}/sessions/{pip}/contexts"), 201)["id"]
    code = "import mine\nprint(mine.version, mine.__file__.startswith('/workspace/.local/'))"
    assert api.run(pip, code)["error"]["name"] == "ModuleNotFoundError"
    assert api.run(pip, code, context_id=context)["error"]["name"] == "ModuleNotFoundError"

    installed = shell(api, pip, f"pip install ./{MINE} && pip show mine")

    assert installed["exit_code"] == 0, installed
    assert shell(api, pip, f"python3 -c '{code.replace(chr(39), chr(34))}'")["stdout"] == (
        "1.0 True\n"
    )
    assert api.run(pip, code)["stdout"] == "1.0 True\n"
    assert api.run(pip, code, context_id=context)["stdout"] == "1.0 True\n"
    answer(api.http.post(f"{V1}/sessions/{pip}/stop"))
    assert api.run(pip, code)["stdout"] == "1.0 True\n"
    hidden = api.run(pip, code, env={"PYTHONNOUSERSITE": "1"})
    assert hidden["error"]["name"] == "ModuleNotFoundError"


@local
def test_pip_still_installs_from_local_files(api: Api, pip: str) -> None:
    api.put(pip, MINE, PACKED)
    api.put(pip, "index/mine/index.html", f'<a href="../../{MINE}">{MINE}</a>'.encode())
    found = shell(api, pip, "pip install --no-index --find-links . --target a mine")
    assert (found["exit_code"], found["stderr"]) == (0, "")
    listed = shell(api, pip, "pip list")
    assert (listed["exit_code"], listed["stderr"]) == (0, "")
    own = {"PIP_INDEX_URL": "file:///workspace/index"}
    assert shell(api, pip, "pip install --target b mine", env=own)["exit_code"] == 0
    result = shell(api, pip, "pip install --index-url file:///workspace/index --target c mine")
    assert result["exit_code"] == 0, result
    assert sh(api, pip, "ls -d */mine.py") == "a/mine.py\nb/mine.py\nc/mine.py\n"


@local
@pytest.mark.quick
@pytest.mark.slow
def test_npm_reports_at_once_that_the_network_is_disabled(api: Api, session: str) -> None:
    if shutil.which("npm") is None:
        missing("npm is not installed (package npm)")
    result = shell(api, session, "npm install left-pad")
    assert result["exit_code"] == 1
    assert "ENOTCACHED" in result["stderr"]
    assert (result["artifacts"], api.names(session)) == ([], [])
