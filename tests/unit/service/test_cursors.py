"""Cursors of lists that are no table's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import InvalidRequest
from atoll.service import cursors

names = st.binary(max_size=50).map(lambda data: data.decode("utf-8", "surrogateescape"))


@given(place=names)
def test_a_cursor_leads_back_to_its_place_whatever_bytes_are_in_it(place: str) -> None:
    written = cursors.written("n", place)

    assert written is not None
    assert written.isascii()
    assert cursors.read("n", written) == place


def test_a_list_without_an_end_and_one_at_its_end_have_none() -> None:
    assert cursors.written("n", None) is None
    assert cursors.read("n", None) is None


@pytest.mark.parametrize("cursor", ["", "?", "bg*", "ü", "b", cursors.written("t", "x")])
def test_what_is_of_no_list_or_of_another_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        cursors.read("n", cursor)

    assert refused.value.code == "bad_cursor"
