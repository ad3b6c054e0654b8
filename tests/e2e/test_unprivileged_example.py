"""The first example of the README, as an ordinary user."""

from __future__ import annotations

import pytest

from tests import unprivileged

pytestmark = pytest.mark.quick

EXAMPLE = """
from atoll import Atoll

with Atoll() as atoll, atoll.session() as session:
    print(session.run("print(6 * 7)").stdout)
"""


def test_the_first_example_runs_as_an_ordinary_user_and_leaves_nothing(bubblewrap: str) -> None:
    unprivileged.require()
    with unprivileged.directory() as home:
        done = unprivileged.run("-c", EXAMPLE, home=home)
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "42", "")
        left = [path for path in home.rglob("*") if path.is_file() and "instances" in path.parts]
        assert left == []


def test_the_example_really_runs_without_rights(bubblewrap: str) -> None:
    unprivileged.require()
    with unprivileged.directory() as home:
        code = (
            "import os; print(os.getresuid(), os.getgroups());"
            "print(open('/proc/self/status').read())"
        )
        done = unprivileged.run("-c", code, home=home)
    uid = unprivileged.UID
    assert done.stdout.startswith(f"({uid}, {uid}, {uid})")
    assert uid != 0
    assert "CapEff:\t0000000000000000" in done.stdout
