"""Grants: what they are good for, and until when."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from atoll.errors import Forbidden
from atoll.service.auth.executor_tokens import ExecutorTokens
from atoll.service.files.grants import MAX_LIFETIME, Grant, GrantTokens
from atoll.testing import ManualClock

HOUR = timedelta(hours=1)
GRANT = Grant("GET", "sess_1", "dir/\udcff", "näme", None)


def code(signing: GrantTokens, token: str, method: str = "GET") -> str:
    with pytest.raises(Forbidden) as refused:
        signing.verify(token, method)
    return refused.value.code


def test_a_grant_is_valid_until_it_expires() -> None:
    clock = ManualClock()
    signing = GrantTokens("secret", clock)
    token, end = signing.make(GRANT, HOUR)
    assert end == clock.now() + HOUR
    assert signing.verify(token, "GET") == GRANT
    clock.time += HOUR.total_seconds() - 1
    assert signing.verify(token, "GET") == GRANT
    clock.time += 1
    assert code(signing, token) == "signed_url_expired"


def test_no_grant_is_valid_for_more_than_a_week() -> None:
    clock = ManualClock()
    _, end = GrantTokens("secret", clock).make(GRANT, timedelta(days=400))
    assert end == clock.now() + MAX_LIFETIME


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "get", ""])
def test_a_grant_is_valid_for_one_method(method: str) -> None:
    signing = GrantTokens("secret", ManualClock())
    token, _ = signing.make(GRANT, HOUR)
    assert code(signing, token, method) == "signed_url_invalid"


@pytest.mark.parametrize(
    "grant",
    [
        GRANT,
        replace(GRANT, may_start=False),
        replace(GRANT, key_id="key_1"),
        replace(GRANT, may_start=False, key_id="key_1"),
    ],
)
def test_grants_are_valid_on_all_replicas_of_one_database_and_nowhere_else(grant: Grant) -> None:
    clock = ManualClock()
    token, _ = GrantTokens("secret", clock).make(grant, HOUR)
    assert GrantTokens("secret", clock).verify(token, "GET") == grant
    assert code(GrantTokens("another", clock), token) == "signed_url_invalid"


def test_the_token_of_an_instance_is_not_a_grant() -> None:
    clock = ManualClock()
    token = ExecutorTokens("secret", clock, HOUR).make("inst_1")
    assert code(GrantTokens("secret", clock), token) == "signed_url_invalid"


@pytest.mark.parametrize(
    "change",
    [
        lambda token: "",
        lambda token: ".",
        lambda token: token[1:],
        lambda token: token[:-1],
        lambda token: token + "A",
        lambda token: token + ".",
        lambda token: token.replace(".", ".."),
        lambda token: token.partition(".")[0],
        lambda token: token.swapcase(),
        lambda token: token + "\u0660",
        lambda token: token * 1000,
        lambda token: " " + token,
    ],
)
def test_a_changed_grant_is_refused(change: object) -> None:
    signing = GrantTokens("secret", ManualClock())
    token, _ = signing.make(GRANT, HOUR)
    assert code(signing, change(token)) == "signed_url_invalid"  # type: ignore[operator]
