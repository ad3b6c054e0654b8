"""What an ordinary user is advised."""

from __future__ import annotations

import pytest

from atoll.drivers.local.cgroup_delegation import Decision
from atoll.drivers.local.doctor_advice import without_root
from atoll.drivers.shared.checks import Check

NAMES = (
    "host uids", "control group: memory", "control group: cpu", "control group: pids",
    "socket buffers", "workspace quota", "Debian packages", "bucket mounts",
)  # fmt: skip


def checks(*ok: str) -> list[Check]:
    own = [Check(name, name in ok, "", unprivileged=name not in ok) for name in NAMES]
    # Missing for root as well: not part of the advice.
    return [*own, Check("node", False, "not there", "apt-get install nodejs")]


def test_root_gets_no_advice() -> None:
    assert without_root(checks(*NAMES), Decision.ROOT, None) == ("", [])


def test_all_weaker_checks_are_in_one_paragraph() -> None:
    paragraph, ways = without_root(checks(), Decision.VERSION_ONE, None)
    assert "8 of these are weaker or missing" in paragraph
    assert "memory, socket buffers and disk are checked every 100 ms" in paragraph
    for words in ("your uid", "CPU time", "RLIMIT_NPROC", "Debian packages", "buckets"):
        assert words in paragraph
    assert [name for name, _ in ways] == ["root", "systemd", "Docker"]


def test_checks_provided_by_delegation_are_not_called_weaker() -> None:
    given = ("control group: memory", "control group: cpu", "control group: pids", "socket buffers")
    paragraph, ways = without_root(checks(*given), Decision.DELEGATED, None)
    assert "4 of these" in paragraph
    assert "disk is checked every 100 ms and can exceed its limit" in paragraph
    assert "CPU" not in paragraph
    assert [name for name, _ in ways] == ["root", "Docker"]


@pytest.mark.parametrize(
    ("decision", "trouble", "expected"),
    [
        pytest.param(Decision.ASK, None, "atoll serve asks for it when it starts", id="asked"),
        pytest.param(Decision.ASK, "no bus", "cannot ask for it (no bus)", id="no systemd"),
        pytest.param(Decision.VERSION_ONE, None, "has cgroup v1", id="version 1"),
        pytest.param(Decision.SERVICE, None, "DelegateSubgroup=server", id="service"),
        pytest.param(Decision.DELEGATED, None, "not delegated to users", id="not all of them"),
    ],
)
def test_the_advice_about_systemd_fits_this_machine(
    decision: Decision, trouble: str | None, expected: str
) -> None:
    _, ways = without_root(checks(), decision, trouble)
    assert expected in dict(ways)["systemd"]
