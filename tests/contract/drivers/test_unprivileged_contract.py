"""The contract once more, in a process of an ordinary user."""

from __future__ import annotations

import os

import pytest

from tests import unprivileged

SUITES = [
    "tests/contract/drivers/test_driver_contract.py",
    "tests/contract/drivers/test_local_driver.py",
    "tests/contract/drivers/test_copy.py",
    "tests/contract/drivers/test_pause.py",
    "tests/unit/test_app.py",
    "tests/unit/drivers",
    "tests/unit/executor/test_watch.py",
    "tests/unit/executor/test_workspace.py",
]


@pytest.mark.skipif(not unprivileged.ROOT, reason="the contract runs unprivileged here by itself")
def test_the_contract_holds_for_an_ordinary_user(bubblewrap: str) -> None:
    missing = unprivileged.available()
    if missing:
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    with unprivileged.directory() as home:
        options = ["-q", "-p", "no:cacheprovider", f"--basetemp={home / 'tmp'}"]
        done = unprivileged.run(
            "-m", "pytest", *options, "--rootdir", str(unprivileged.CHECKOUT),
            "-c", str(unprivileged.CHECKOUT / "pyproject.toml"),
            # A Docker engine takes root.
            "-k", "not [docker and not -docker and not [gvisor and not [remote",
            *(str(unprivileged.CHECKOUT / suite) for suite in SUITES),
            home=home, timeout=300,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
