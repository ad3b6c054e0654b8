"""Tokens of instances."""

from __future__ import annotations

from datetime import timedelta

import pytest

from atoll.errors import Unauthenticated
from atoll.service.auth.executor_tokens import ExecutorTokens
from atoll.testing import ManualClock

DAY = timedelta(days=1)


def test_a_token_is_valid_for_its_instance_until_it_expires() -> None:
    clock = ManualClock()
    tokens = ExecutorTokens("secret", clock, DAY)
    token = tokens.make("inst_1")
    assert tokens.verify(token) == "inst_1"
    clock.time += DAY.total_seconds() - 2
    assert tokens.verify(token) == "inst_1"
    clock.time += 2
    with pytest.raises(Unauthenticated) as expired:
        tokens.verify(token)
    assert expired.value.code == "token_expired"


def test_tokens_are_valid_on_all_replicas_of_one_database_and_nowhere_else() -> None:
    clock = ManualClock()
    token = ExecutorTokens("secret", clock, DAY).make("inst_1")
    assert ExecutorTokens("secret", clock, DAY).verify(token) == "inst_1"
    with pytest.raises(Unauthenticated):
        ExecutorTokens("another", clock, DAY).verify(token)


@pytest.mark.parametrize(
    "change",
    [
        lambda token: "",
        lambda token: "x",
        lambda token: token[:-1],
        lambda token: token + "0",
        lambda token: token.replace("inst_1", "inst_2"),
        lambda token: token.replace("inst_1", ""),
        lambda token: token.replace(".", ".9", 2),
        lambda token: token.replace("inst_1.", "inst_1. "),
        lambda token: token.replace("inst_1.", "inst_1.0"),
        lambda token: token.replace("inst_1.", "inst_1." + "9" * 5000),
        lambda token: token.replace("atollinst", "atoll"),
        lambda token: token.rpartition(".")[0] + ".\u0660\udc80",
        lambda token: token.upper(),
    ],
)
def test_a_modified_token_is_rejected(change: object) -> None:
    tokens = ExecutorTokens("secret", ManualClock(), DAY)
    with pytest.raises(Unauthenticated) as unknown:
        tokens.verify(change(tokens.make("inst_1")))  # type: ignore[operator]
    assert unknown.value.code == "token_unknown"
