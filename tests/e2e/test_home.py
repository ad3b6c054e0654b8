"""Home, caches and fonts of a sandbox."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests import drivers
from tests.e2e.api import V1, Api, answer, sh

pytestmark = pytest.mark.quick

local = pytest.mark.skipif(drivers.CHOSEN != "local", reason="the image has no pip and no fonts")


def shell(api: Api, session: str, line: str, **fields: Any) -> dict[str, Any]:
    return api.run(session, line, language="shell", timeout=60, wait=60, **fields)


# Home


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
def test_the_user_s_home_is_the_same_to_programs_that_ignore_the_variable(
    api: Api, session: str
) -> None:
    code = "import os, pwd\nprint(pwd.getpwuid(os.getuid()).pw_dir)"
    assert api.run(session, code)["stdout"] == "/workspace\n"


@pytest.mark.every_driver
def test_caches_are_not_among_the_files_of_a_session(api: Api, session: str) -> None:
    result = shell(api, session, 'mkdir -p "$XDG_CACHE_HOME"; echo x > "$XDG_CACHE_HOME/cached"')
    assert (result["exit_code"], result["artifacts"]) == (0, [])
    assert sh(api, session, "cat /tmp/.cache/cached") == "x\n"
    assert api.names(session) == []


def test_a_home_that_the_user_names_is_used(api: Api, session: str) -> None:
    assert shell(api, session, "echo ~", env={"HOME": "/workspace/me"})["stdout"] == (
        "/workspace/me\n"
    )


# Fonts


@local
def test_fontconfig_finds_its_settings(api: Api, session: str) -> None:
    assert "<fontconfig>" in sh(api, session, "cat /etc/fonts/fonts.conf")
    if shutil.which("fc-list") is not None:
        result = shell(api, session, "fc-list")
        assert (result["exit_code"], result["stderr"]) == (0, "")
