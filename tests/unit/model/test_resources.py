"""Sizes and cores as people write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import InvalidRequest
from atoll.model.resources import format_cpu, format_size, parse_cpu, parse_size

SIZES = {
    "1": 1,
    "1000000": 1_000_000,
    "1k": 1000,
    "1K": 1000,
    "1Ki": 1024,
    "512Mi": 512 * 2**20,
    "1Gi": 2**30,
    "1.5Gi": 3 * 2**29,
    "2Ti": 2**41,
    "5M": 5_000_000,
    "5MB": 5_000_000,
    "5MiB": 5 * 2**20,
    " 64 Mi ": 64 * 2**20,
}
NO_SIZES = [
    "",
    "0",
    "-1",
    "1e9",
    "Mi",
    "1Pi",
    "1 2",
    "1,5Gi",
    "0.0001Ki",
    "٣Mi",
    "1Mi\n1",
    "9" * 16,
]


@pytest.mark.parametrize(("text", "size"), SIZES.items(), ids=SIZES.keys())
def test_a_size_is_parsed(text: str, size: int) -> None:
    assert parse_size(text, "memory") == size


@pytest.mark.parametrize("text", NO_SIZES, ids=repr)
def test_an_invalid_size_is_refused_with_its_field(text: str) -> None:
    with pytest.raises(InvalidRequest, match="memory") as caught:
        parse_size(text, "memory")
    assert caught.value.details == {"field": "memory"}


CORES = {"1": 1.0, "0.5": 0.5, "500m": 0.5, "1500m": 1.5, "2.25": 2.25, " 4 ": 4.0}


@pytest.mark.parametrize(("text", "cores"), CORES.items(), ids=CORES.keys())
def test_a_number_of_cores_is_parsed(text: str, cores: float) -> None:
    assert parse_cpu(text) == cores


@pytest.mark.parametrize("text", ["", "0", "0m", "-1", "1.", "m", "one", "1e3", "nan", "inf", "1M"])
def test_an_invalid_number_of_cores_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="cpu"):
        parse_cpu(text)


@given(st.integers(min_value=1, max_value=2**49))
def test_a_formatted_size_is_parsed_to_the_same_value(size: int) -> None:
    assert parse_size(format_size(size), "disk") == size


@given(st.integers(min_value=1, max_value=999_999))
def test_formatted_cores_are_parsed_to_the_same_value(thousandths: int) -> None:
    assert parse_cpu(format_cpu(thousandths / 1000)) == pytest.approx(thousandths / 1000, rel=1e-5)


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parse in (lambda: parse_size(text, "memory"), lambda: parse_cpu(text)):
        with contextlib.suppress(InvalidRequest):
            assert parse() > 0
