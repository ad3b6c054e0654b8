"""Answers of a program that may be an attacker's."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.drivers.shared.packages.install_results import (
    MAX_PACKAGES,
    InstallFailed,
    check_held,
    decoded,
    installed,
    interpreter,
)

PLAIN = {"version": "cpython 3.11.2", "platform": "linux-x86_64 cpython-311", "packages": {}}


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"[" * 200_000, b"{", b'"x"', b"\xff", b"1" * 10_000, b'{"a":' * 100_000],
    ids=["nothing", "list", "deep", "half", "text", "bytes", "number", "nested"],
)
def test_an_answer_that_is_not_an_object_is_a_permanent_error(data: bytes) -> None:
    with pytest.raises(InstallFailed):
        decoded(data)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"version": ""},
        {"version": "x" * 201},
        {"platform": None},
        {"platform": "a\nb"},
        {"platform": "\ud800"},
        {"packages": None},
        {"packages": ["a"]},
        {"packages": {"a": 1}},
        {"packages": {str(number): "1" for number in range(MAX_PACKAGES + 1)}},
    ],
    ids=str,
)
def test_an_invalid_description_is_a_permanent_error(change: dict[str, Any]) -> None:
    with pytest.raises(InstallFailed):
        interpreter({**PLAIN, **change}, ("image",))


def test_packages_with_invalid_names_are_ignored() -> None:
    packages = {"fine": "1.0", "odd name": "1", "odd": "1 2", "--evil": "1", "a" * 200: "1"}
    found = interpreter({**PLAIN, "packages": packages}, ("image",))
    assert found.packages == {"fine": "1.0"}


def test_interpreters_of_two_images_differ() -> None:
    mine, other = interpreter(PLAIN, ("root", "/a", "")), interpreter(PLAIN, ("root", "/b", ""))
    assert mine.fingerprint == interpreter(dict(PLAIN), ("root", "/a", "")).fingerprint
    assert mine.fingerprint != other.fingerprint
    # The output of an image does not affect which image it belongs to.
    assert interpreter(PLAIN, ("root",)).fingerprint != interpreter(PLAIN, ()).fingerprint


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"installed": None},
        {"installed": [1]},
        {"installed": ["a"]},
        {"installed": ["../../x==1"]},
        {"installed": ["a==1 --evil"]},
        {"installed": ["A==1"]},
        {"installed": ["a==1"] * (MAX_PACKAGES + 1)},
        {"error": {"a": "\ud800\0"}},
        {"error": None},
    ],
    ids=lambda answer: str(answer)[:40],
)
def test_an_invalid_answer_is_a_permanent_error_with_a_printable_message(
    answer: dict[str, Any],
) -> None:
    with pytest.raises(InstallFailed) as caught:
        installed(answer)
    assert "\0" not in caught.value.message
    caught.value.message.encode()


def test_a_package_neither_installed_nor_in_the_template_is_missing() -> None:
    check_held({"a": "1"}, {"a": "1", "b": "2"})
    with pytest.raises(InstallFailed, match="a==2"):
        check_held({"a": "2"}, {"a": "1"})
