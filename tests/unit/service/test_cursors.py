"""Cursors of lists that are not tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import InvalidRequest
from atoll.service import cursors

names = st.binary(max_size=50).map(lambda data: data.decode("utf-8", "surrogateescape"))


@given(place=names)
def test_a_cursor_encodes_a_position_of_any_bytes(place: str) -> None:
    written = cursors.encode("n", place)

    assert written is not None
    assert written.isascii()
    assert cursors.decode("n", written) == place


def test_the_end_of_a_list_has_no_cursor() -> None:
    assert cursors.encode("n", None) is None
    assert cursors.decode("n", None) is None


@pytest.mark.parametrize("cursor", ["", "?", "bg*", "ü", "b", cursors.encode("t", "x")])
def test_a_cursor_of_another_list_and_no_cursor_at_all_are_rejected(cursor: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        cursors.decode("n", cursor)

    assert refused.value.code == "bad_cursor"
