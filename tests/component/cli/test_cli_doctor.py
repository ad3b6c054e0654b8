"""`atoll doctor` as an ordinary user."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from tests import unprivileged

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

COMMAND = """
import os, sys
os.environ.update({env!r})
sys.argv = ["atoll", "doctor", *{words!r}]
from atoll.cli import main
main()
"""
FIELDS = {"name", "ok", "detail", "fix", "essential", "requirement"}


@pytest.fixture
def home() -> Iterator[Path]:
    unprivileged.require()
    with unprivileged.directory() as home:
        yield home


def doctor(home: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return unprivileged.run("-c", COMMAND.format(env=env, words=arguments), home=home)


def unified(home: Path) -> Path:
    """A machine with cgroup v2, where the user owns no group."""
    root = home / "cgroup"
    root.mkdir(mode=0o755)
    (root / "cgroup.controllers").write_text("cpu memory pids")
    return root


def test_advice_about_root_is_printed_once(home: Path) -> None:
    shown = doctor(home, ATOLL_LOCAL__CGROUP_ROOT=str(home / "none")).stdout
    assert shown.count("sudo atoll serve") == 1
    assert "to fix it, run\n    sudo" not in shown
    assert "8 of these are weaker or missing" in shown
    assert "which has cgroup v1" in shown
    assert "ATOLL_DRIVER=docker atoll serve" in shown


def test_delegation_is_suggested_on_cgroup_v2(home: Path) -> None:
    env = {"ATOLL_LOCAL__CGROUP_ROOT": str(unified(home)), "XDG_RUNTIME_DIR": str(home)}
    shown = doctor(home, **env).stdout
    assert "by delegation of cgroup v2" in shown
    reason = f"no systemd of this user at {home}/bus" if shutil.which("busctl") else "busctl is not"
    assert reason in shown


def test_other_problems_keep_their_own_advice(home: Path) -> None:
    done = doctor(home, ATOLL_LOCAL__BUBBLEWRAP="no-such-bwrap")
    assert done.returncode == 1
    assert "bubblewrap: to fix it, run\n    apt-get install bubblewrap" in done.stdout


def test_the_json_output_has_the_same_fields_and_one_more(home: Path) -> None:
    found = json.loads(doctor(home, "--json").stdout)
    assert all(set(check) == FIELDS | {"unprivileged"} for check in found)
    by_name = {check["name"]: check for check in found}
    assert by_name["host uids"]["fix"] == "sudo atoll serve"
    assert by_name["host uids"]["unprivileged"]
    assert not by_name["namespaces"]["unprivileged"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_gets_no_advice_about_privileges(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from atoll.cli.commands import tree

    done = CliRunner().invoke(tree(), ["doctor", "--data-dir", str(tmp_path)])
    assert "does not run as root" not in done.stdout
