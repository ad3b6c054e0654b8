"""JSON values, counted without parsing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.model.json_size import has_at_most

VALUES = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def count(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(count, value.values()))
    return 1


@given(VALUES)
def test_no_text_with_too_many_values_passes(value: Any) -> None:
    text, values = json.dumps(value).encode(), count(value)
    if values > 1:
        # An empty list is counted as one value more than it is.
        assert not has_at_most(text, values // 2 - 1)
    assert has_at_most(text, 2 * values + 1)


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        (b"[" + b"[]," * 1000 + b"1]", False),
        (b"{" + b'"a":1,' * 1000 + b"}", False),
        (b'{"code": "' + b"a, b: [{ " * 1000 + b'"}', True),
        (b'{"code": "' + b'\\", \\"' * 1000 + b'"}', True),
        (b"x" * 1000, True),
    ],
)
def test_commas_and_brackets_in_strings_are_not_counted(text: bytes, passes: bool) -> None:
    assert has_at_most(text, 100) is passes
