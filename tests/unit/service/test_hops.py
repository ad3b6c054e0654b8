"""The mark of requests that are passed on, and the memory of where sessions are."""

from __future__ import annotations

import pytest

from atoll.errors import Forbidden
from atoll.service.hops import Hop, Hops
from atoll.service.peers import Places

HOP = Hop("local-1", "https")


def test_a_mark_is_read_by_whoever_has_the_same_secret() -> None:
    mark = Hops("secret").make(HOP, "POST", b"/a?b=c")
    assert Hops("secret").read(mark, "POST", b"/a?b=c") == HOP


@pytest.mark.parametrize(
    ("secret", "method", "target"),
    [("other", "POST", b"/a"), ("secret", "GET", b"/a"), ("secret", "POST", b"/b")],
    ids=["another database", "another method", "another path"],
)
def test_a_mark_is_for_one_request(secret: str, method: str, target: bytes) -> None:
    mark = Hops("secret").make(HOP, "POST", b"/a")
    with pytest.raises(Forbidden) as refused:
        Hops(secret).read(mark, method, target)
    assert refused.value.code == "hop_refused"


@pytest.mark.parametrize(
    "change",
    [
        lambda mark: "",
        lambda mark: mark[:-1],
        lambda mark: mark.replace("local-1", "local-2"),
        lambda mark: mark.replace("https", "http"),
        lambda mark: mark.replace("https", "ftp"),
        lambda mark: mark + " ",
        lambda mark: mark + "ä",
        lambda mark: mark * 100,
        lambda mark: "   ",
    ],
)
def test_a_mark_that_was_changed_is_refused(change: object) -> None:
    mark = Hops("secret").make(HOP, "POST", b"/a")
    assert callable(change)
    with pytest.raises(Forbidden):
        Hops("secret").read(change(mark), "POST", b"/a")


def test_places_are_bounded_and_the_least_used_go_first() -> None:
    places = Places(3)
    for name in "abc":
        places.keep(name, name.upper())
    assert places.get("a") == "A"
    places.keep("d", "D")
    assert len(places) == 3
    assert (places.get("a"), places.get("b"), places.get("d")) == ("A", None, "D")
    places.keep("a", "E")
    assert places.get("a") == "E"
    places.drop("a")
    places.drop("a")
    assert places.get("a") is None
