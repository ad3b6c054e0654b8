"""Where apt finds packages in a build: the base's own sources, or the mirror of the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from atoll.drivers.local import apt_sources
from atoll.errors import InvalidRequest
from atoll.settings import PackageSettings

if TYPE_CHECKING:
    from pathlib import Path

HERE = "http://127.0.0.1:3142"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "etc/apt/sources.list.d").mkdir(parents=True)
    return tmp_path


def lines(base: Path, **options: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    found = apt_sources.sources_of(base, PackageSettings.model_validate(options))
    return found.lines, found.addresses


def test_lines_lose_their_addresses_and_keep_the_rest(base: Path) -> None:
    (base / "etc/apt/sources.list").write_text(
        "# deb http://commented.example/debian old main\n"
        "deb http://a.example/debian stable main contrib # the rest\n"
        "deb-src http://a.example/debian stable main\n"
        "deb [ arch=amd64 signed-by=/k.gpg ] https://b.example/x/ stable main\n"
        "deb http://a.example/debian stable-updates main\n"
        "deb cdrom:[Disc]/ stable main\ndeb file:/srv/debs ./\ndeb [broken http://c.example x y\n"
    )

    assert lines(base) == (
        (
            f"deb {HERE}/0/ stable main contrib",
            f"deb [arch=amd64 signed-by=/k.gpg] {HERE}/1/ stable main",
            f"deb {HERE}/0/ stable-updates main",
        ),
        ("http://a.example/debian", "https://b.example/x/"),
    )


def test_stanzas_become_lines(base: Path) -> None:
    (base / "etc/apt/sources.list.d/debian.sources").write_text(
        "# A comment\nTypes: deb deb-src\nURIs: http://a.example/debian\n"
        "Suites: stable stable-updates\nComponents: main\n contrib\nSigned-By: /k.gpg\n\n"
        "Types: deb\nURIs: http://off.example/\nSuites: x\nEnabled: no\n"
    )

    assert lines(base) == (
        (
            f"deb [signed-by=/k.gpg] {HERE}/0/ stable main contrib",
            f"deb [signed-by=/k.gpg] {HERE}/0/ stable-updates main contrib",
        ),
        ("http://a.example/debian",),
    )


def test_the_mirror_of_the_settings_replaces_all_others(base: Path) -> None:
    (base / "etc/apt/sources.list").write_text("deb http://a.example/debian stable main\n")
    (base / "etc/os-release").write_text('VERSION_CODENAME="tiny"\n')
    mirror = "https://m.example/debian"

    assert lines(base, debian_mirror=mirror) == ((f"deb {HERE}/0/ tiny main",), (mirror,))
    given = {"debian_mirror": mirror, "debian_suite": "x", "debian_components": "main extra"}
    assert lines(base, **given)[0] == (f"deb {HERE}/0/ x main extra",)
    flat = {"debian_mirror": mirror, "debian_suite": "./", "debian_unsigned": True}
    assert lines(base, **flat)[0] == (f"deb [trusted=yes] {HERE}/0/ ./",)


def test_a_base_without_a_mirror_is_refused(base: Path) -> None:
    (base / "etc/apt/sources.list").symlink_to("/etc/apt/sources.list")
    with pytest.raises(InvalidRequest, match="DEBIAN_MIRROR"):
        lines(base)
    with pytest.raises(InvalidRequest, match="DEBIAN_SUITE"):
        lines(base, debian_mirror="http://m.example/")
