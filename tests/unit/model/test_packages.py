"""Which packages may be requested, and their conflicts with a template."""

from __future__ import annotations

import pytest

from atoll.errors import InvalidRequest
from atoll.model.install import Dependency
from atoll.model.packages import Interpreter, conflicts, covered, is_pinned, merged, normalised

HAS = {"numpy": "2.1.0", "odd": "not-a-version", "early": "3.0rc1"}


def test_equal_sets_have_one_normal_form() -> None:
    one = (Dependency("Requests", ">=2,<3"), Dependency("a.b_c[Two,one]"))
    two = (Dependency("A-B-C[one, two]"), Dependency("requests", "<3,>=2"))
    assert normalised(one) == normalised(two)
    assert [each.requirement for each in normalised(one)] == ["a-b-c[one,two]", "requests<3,>=2"]


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("", ""),
        ("-r", ""),
        ("--index-url", "==1"),
        ("a b", ""),
        ("a;python_version>'3'", ""),
        ("a @ http://host/a.whl", ""),
        ("a==1", ""),
        ("a", "1.0"),
        ("a", "=1"),
        ("a", "==1;x"),
        ("a", "==1 --hash"),
        ("a", "==1\n-r x"),
        ("a", "===1"),
        ("a", "@file:///x"),
        ("a[", ""),
        ("../a", ""),
    ],
)
def test_only_names_extras_and_versions_are_accepted(name: str, version: str) -> None:
    with pytest.raises(InvalidRequest):
        normalised([Dependency(name, version)])


@pytest.mark.parametrize(
    ("name", "version", "told"),
    [("ht tp", "", "'ht tp' is not the name"), ("six", "1.16", "'1.16', for six, is not")],
)
def test_an_invalid_requirement_is_quoted_in_the_error(name: str, version: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        normalised([Dependency(name, version)])


def test_a_package_can_be_listed_only_once() -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        normalised([Dependency("a-b"), Dependency("A_B", "==1")])


def test_fifty_packages_are_allowed() -> None:
    normalised(Dependency(f"p{number}") for number in range(50))
    with pytest.raises(InvalidRequest, match="at most 50"):
        normalised(Dependency(f"p{number}") for number in range(51))


@pytest.mark.parametrize(
    ("version", "pinned"),
    [("==1.0", True), ("==1.*", False), (">=1", False), ("", False), ("==1.0,>=0", True)],
)
def test_a_set_is_pinned_if_each_package_has_one_version(version: str, pinned: bool) -> None:
    assert is_pinned([Dependency("a", "==1"), Dependency("b", version)]) is pinned


@pytest.mark.parametrize(
    ("dependency", "conflict"),
    [
        (Dependency("numpy", ">=2"), False),
        (Dependency("NumPy", "~=2.1"), False),
        (Dependency("numpy", "<2"), True),
        (Dependency("numpy", "!=2.1.0"), True),
        (Dependency("numpy", "==2.*"), False),
        (Dependency("numpy"), False),
        (Dependency("absent", "<2"), False),
        (Dependency("odd", "==1"), True),
        (Dependency("odd"), False),
        (Dependency("early", ">=2"), False),
    ],
    ids=lambda value: getattr(value, "requirement", value),
)
def test_conflicts_depend_on_the_installed_versions(dependency: Dependency, conflict: bool) -> None:
    found = conflicts([dependency], HAS)
    assert bool(found) is conflict
    if found:
        assert found[0]["template_has"] == HAS[found[0]["name"]]


def test_packages_of_the_template_can_cover_a_request() -> None:
    assert covered([Dependency("numpy", ">2")], HAS) == ("numpy==2.1.0",)
    assert covered([Dependency("numpy", ">2"), Dependency("absent")], HAS) is None
    assert covered([Dependency("numpy[more]")], HAS) is None


def test_a_repeated_package_takes_the_new_version() -> None:
    both = merged([Dependency("a", "==1"), Dependency("b")], [Dependency("A", "==2")])
    assert [each.requirement for each in both] == ["a==2", "b"]


def test_interpreters_with_different_packages_are_distinct() -> None:
    one = Interpreter("cpython 3.11.7", "linux-x86_64", {"a": "1"})
    assert one.fingerprint != Interpreter("cpython 3.11.7", "linux-x86_64", {"a": "2"}).fingerprint
    assert one.fingerprint == Interpreter("cpython 3.11.7", "linux-x86_64", {"a": "1"}).fingerprint
