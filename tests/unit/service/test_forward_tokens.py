"""The token of requests that are forwarded, and the memory of where sessions are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from atoll.errors import AtollError, Forbidden, TemporaryError
from atoll.service.nodes import replay_guard
from atoll.service.nodes.forward_token import MAX_CLOCK_SKEW, Content, ForwardToken, ForwardTokens
from atoll.service.nodes.locations import LruCache
from atoll.service.nodes.replay_guard import ReplayGuard
from atoll.testing import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOP = ForwardToken("local-1", "https", Content.of(b"body"))


@pytest.fixture
def clock() -> ManualClock:
    moved = ManualClock()
    moved.time = 1_000_000.0
    return moved


@pytest.fixture
def hops(tmp_path: Path, clock: ManualClock) -> Callable[..., ForwardTokens]:
    """The tokens of a node, which stores accepted ones in its own directory."""

    def make(node_id: str = "local-1", secret: str = "secret") -> ForwardTokens:
        return ForwardTokens(
            secret, node_id, clock, ReplayGuard(tmp_path / node_id, MAX_CLOCK_SKEW)
        )

    return make


@pytest.mark.parametrize(
    "content",
    [Content.of(b""), Content.of(b"body"), Content(1 << 40), Content(None)],
    ids=["empty", "known", "long", "unknown"],
)
def test_a_token_is_valid_on_its_target_node(
    hops: Callable[..., ForwardTokens], content: Content
) -> None:
    hop = ForwardToken("local-1", "https", content)
    token = hops("local-2").make(hop, "POST", b"/a?b=c")
    assert hops().verify(token, "POST", b"/a?b=c") == hop


@pytest.mark.parametrize(
    ("secret", "method", "target"),
    [("other", "POST", b"/a"), ("secret", "GET", b"/a"), ("secret", "POST", b"/b")],
    ids=["another database", "another method", "another path"],
)
def test_a_token_is_valid_for_one_request(
    hops: Callable[..., ForwardTokens], secret: str, method: str, target: bytes
) -> None:
    token = hops("local-2").make(HOP, "POST", b"/a")
    with pytest.raises(Forbidden) as refused:
        hops(secret=secret).verify(token, method, target)
    assert refused.value.code == "hop_refused"


def test_a_token_is_valid_for_one_node(hops: Callable[..., ForwardTokens]) -> None:
    token = hops("local-2").make(HOP, "POST", b"/a")
    with pytest.raises(TemporaryError) as refused:
        hops("local-3").verify(token, "POST", b"/a")
    assert refused.value.code == "wrong_node"


def _field(number: int, value: str) -> Callable[[str], str]:
    def change(token: str) -> str:
        fields = token.split(" ")
        fields[number] = value
        return " ".join(fields)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda token: "",
        lambda token: token[:-1],
        lambda token: token + " ",
        lambda token: token + "ä",
        lambda token: token * 100,
        lambda token: " " * 7,
        _field(0, "local-2"),
        _field(1, "local-3"),
        _field(2, "http"),
        _field(3, "1000001"),
        _field(4, "A" * 22),
        _field(5, "5"),
        _field(6, Content.of(b"other").digest or ""),
        _field(6, "-"),
        _field(7, "A" * 43),
    ],
)
def test_a_changed_token_is_refused(
    hops: Callable[..., ForwardTokens], change: Callable[[str], str]
) -> None:
    token = hops("local-2").make(HOP, "POST", b"/a")
    with pytest.raises(Forbidden):
        hops().verify(change(token), "POST", b"/a")


@pytest.mark.parametrize("later", [0, MAX_CLOCK_SKEW, 2 * MAX_CLOCK_SKEW, 100 * MAX_CLOCK_SKEW])
@pytest.mark.parametrize("skew", [-MAX_CLOCK_SKEW, 0, MAX_CLOCK_SKEW])
def test_a_token_is_accepted_once_by_all_processes_of_a_node(
    hops: Callable[..., ForwardTokens], clock: ManualClock, later: int, skew: int
) -> None:
    clock.time += skew
    token = hops("local-2").make(HOP, "POST", b"/a")
    clock.time -= skew
    first, second = hops(), hops()
    first.verify(token, "POST", b"/a")
    # Tokens of other minutes remove none that is still needed.
    for _ in range(later // MAX_CLOCK_SKEW):
        clock.time += MAX_CLOCK_SKEW
        first.verify(hops("local-2").make(HOP, "POST", b"/a"), "POST", b"/a")
    # The same process, another one, and one that was started later.
    for asked in (first, second, hops()):
        with pytest.raises(Forbidden) as refused:
            asked.verify(token, "POST", b"/a")
        assert refused.value.code == "hop_refused"


@pytest.mark.parametrize("skew", [-MAX_CLOCK_SKEW - 1, MAX_CLOCK_SKEW + 1])
def test_a_token_of_another_time_is_refused(
    hops: Callable[..., ForwardTokens], clock: ManualClock, skew: int
) -> None:
    token = hops("local-2").make(HOP, "POST", b"/a")
    clock.time += skew
    with pytest.raises(Forbidden):
        hops().verify(token, "POST", b"/a")


def test_the_number_of_remembered_tokens_is_limited(
    hops: Callable[..., ForwardTokens],
    clock: ManualClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_guard, "MAX_PER_MINUTE", 3)
    sender, receiver = hops("local-2"), hops()
    for _ in range(3):
        receiver.verify(sender.make(HOP, "POST", b"/a"), "POST", b"/a")
    for asked in (receiver, hops()):
        with pytest.raises(AtollError) as refused:
            asked.verify(sender.make(HOP, "POST", b"/a"), "POST", b"/a")
        assert refused.value.code == "too_many_forwards"
    for _ in range(10):
        clock.time += 60
        receiver.verify(sender.make(HOP, "POST", b"/a"), "POST", b"/a")
    assert len(list((tmp_path / "local-1").iterdir())) <= 2 * MAX_CLOCK_SKEW // 60 + 1


def test_a_truncated_record_hides_no_others(
    hops: Callable[..., ForwardTokens], clock: ManualClock, tmp_path: Path
) -> None:
    sender = hops("local-2")
    tokens = [sender.make(HOP, "POST", b"/a") for _ in range(3)]
    hops().verify(tokens[0], "POST", b"/a")
    with (tmp_path / "local-1" / str(int(clock.time) // 60)).open("ab") as file:
        file.write(b"half")
    for token in tokens[1:]:
        hops().verify(token, "POST", b"/a")
    for token in tokens:
        with pytest.raises(Forbidden):
            hops().verify(token, "POST", b"/a")


def test_the_cache_is_bounded_and_evicts_the_least_recently_used_entry() -> None:
    cache = LruCache(3)
    for name in "abc":
        cache.put(name, name.upper())
    assert cache.get("a") == "A"
    cache.put("d", "D")
    assert (cache.get("a"), cache.get("b"), cache.get("d")) == ("A", None, "D")
    cache.put("a", "E")
    assert cache.get("a") == "E"
    cache.drop("a")
    cache.drop("a")
    assert cache.get("a") is None
