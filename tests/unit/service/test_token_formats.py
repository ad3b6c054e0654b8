"""Tokens of earlier versions stay valid: clients, executors and other nodes hold them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from atoll.service.auth.executor_tokens import ExecutorTokens
from atoll.service.files.grants import Grant, GrantTokens
from atoll.service.nodes.forward_token import Content, ForwardToken, ForwardTokens
from atoll.service.nodes.probe import NodeProbe
from atoll.service.nodes.replay_guard import ReplayGuard
from atoll.testing import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

GRANT = (
    "WyJHRVQiLCJzZXNzXzEiLCJkaXIvXHUwMGZmIiwxODAwMDAzNjAwLCJuXHUwMGU0bWUiLG51bGwsZmFsc2UsImtleV8x"
    "Il0.7Zbo1KvesumZXOXdG_evpub3BRnOJ-EP5Otj4uaQYec"
)
EXECUTOR = (
    "atollinst.inst_1.1800086400.627f2e1bcffd69d312ac5d8fcf4329f0177f65eb3da15497019f709bee71e21e"
)
PROBE = "1800000000.be057f01f8c8d875c48ff652ed772f43e7d32e06adb4b96f21910094c16d4744"
FORWARD = (
    "local-1 local-2 https 1800000000 AAAAAAAAAAAAAAAAAAAAAA 4 "
    "Iw2DWNyOiJC0xY3utikS7i8gNXrpKlzIYbmOaP4xrLU cBLkHcRyAC2jOEtc8hah7j_I_-cbi4S3RYDSTAmnc-o"
)


@pytest.fixture
def clock() -> ManualClock:
    clock = ManualClock()
    clock.time += (datetime.fromtimestamp(1_800_000_000, UTC) - clock.now()).total_seconds()
    return clock


def test_a_signed_link(clock: ManualClock) -> None:
    grant = Grant("GET", "sess_1", "dir/\udcff", "näme", None, False, "key_1")
    tokens = GrantTokens("secret", clock)
    assert tokens.verify(GRANT, "GET") == grant
    assert tokens.make(grant, timedelta(hours=1))[0] == GRANT


def test_the_token_of_an_executor(clock: ManualClock) -> None:
    tokens = ExecutorTokens("secret", clock, timedelta(days=1))
    assert tokens.verify(EXECUTOR) == "inst_1"
    assert tokens.make("inst_1") == EXECUTOR


def test_the_token_of_a_probe(clock: ManualClock) -> None:
    probe = NodeProbe("secret", clock, timedelta(seconds=1))
    probe.verify(PROBE, "a")
    assert probe.token("a") == PROBE


def test_the_token_of_a_forwarded_request(clock: ManualClock, tmp_path: Path) -> None:
    tokens = ForwardTokens("secret", "local-1", clock, ReplayGuard(tmp_path, 60))
    expected = ForwardToken("local-1", "https", Content.of(b"body"))
    assert tokens.verify(FORWARD, "POST", b"/a?b=c") == expected
