"""Where a template's interpreter lives, found without running it."""

from __future__ import annotations

import os
import stat
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from atoll.drivers.local import root_file_system
from atoll.drivers.local.sandbox import LAYERED, RootFileSystem
from atoll.errors import InvalidRequest
from atoll.model.resources import Resources
from atoll.model.template import Template


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path.resolve() / "roots"
    path.mkdir()
    return path


def program(path: Path) -> Path:
    """A program that records its execution."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ntouch {path}.was-run\n")
    path.chmod(0o755)
    return path


def environment(place: Path, home: Path, target: Path) -> Path:
    (place / "bin").mkdir(parents=True)
    (place / "pyvenv.cfg").write_text(f"home = {home}\nversion = 3.11\n")
    python = place / "bin" / "python"
    python.symlink_to(target)
    return python


def template(*, python: str = "", image: str = "") -> Template:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return Template(
        id="t", name="t", created_at=now, updated_at=now,
        default_resources=Resources(1, 1 << 26, 1 << 24, 16), python=python, image=image,
    )  # fmt: skip


def tree(python: Path, *roots: Path, default: bool = False) -> RootFileSystem:
    named = template(python="" if default else str(python))
    return root_file_system.root_of(named, Path("/etc"), python if default else None, roots)


def test_an_interpreter_is_never_executed(root: Path) -> None:
    python = program(root / "own/bin/python3")
    assert (str(root / "own"), str(root / "own")) in tree(python, root).binds
    assert not list(root.rglob("*.was-run"))


def test_a_link_to_an_interpreter_is_resolved(root: Path) -> None:
    real = program(root / "real/bin/python3.12")
    (root / "python").symlink_to(real)
    found = tree(root / "python", root)
    assert found.python == str(real)
    assert (str(root / "real"), str(root / "real")) in found.binds


def test_a_virtual_environment_includes_its_base_under_every_name(root: Path) -> None:
    program(root / "python-3.12.1/bin/python3")
    (root / "python-3.12").symlink_to("python-3.12.1")
    home = root / "python-3.12/bin"
    python = environment(root / "venv", home, home / "python3")
    found = tree(python, root)
    assert found.python == str(python)
    base = str(root / "python-3.12.1")
    assert (str(root / "venv"), str(root / "venv")) in found.binds
    assert (base, base) in found.binds
    assert (base, str(root / "python-3.12")) in found.binds


def test_the_base_can_be_that_of_the_system_or_of_atoll(root: Path) -> None:
    own = Path(sys.base_prefix).resolve()
    python = environment(root / "a", own / "bin", Path(sys.executable).resolve())
    assert (str(own), str(own)) in tree(python, root).binds or str(own).startswith("/usr")
    system = environment(root / "b", Path("/usr/bin"), Path("/usr/bin/env"))
    assert tree(system, root).python == str(system)


def test_a_base_elsewhere_is_refused(root: Path) -> None:
    outside = program(root.parent / "outside/bin/python3")
    linked = root / "linked"
    linked.symlink_to(outside)
    for python in (
        linked,
        environment(root / "a", outside.parent, outside),
        environment(root / "b", root / "../outside/bin", outside),
        # It claims a base that is allowed, but is another.
        environment(root / "c", Path("/usr/bin"), outside),
    ):
        with pytest.raises(InvalidRequest) as caught:
            tree(python, root)
        assert caught.value.code == "place_not_allowed", python
    assert not list(root.parent.rglob("*.was-run"))


def test_the_default_interpreter_can_be_anywhere(root: Path) -> None:
    outside = program(root.parent / "outside/bin/python3")
    assert tree(outside, root, default=True).python == str(outside)


def test_the_root_directory_is_never_the_directory_of_an_interpreter(root: Path) -> None:
    python = environment(root / "a", Path("/bin/.."), Path("/usr/bin/env"))
    (root / "a/pyvenv.cfg").write_text("home = /\n")
    with pytest.raises(InvalidRequest):
        tree(python, Path("/"))


@pytest.mark.parametrize("case", ["missing", "directory", "not executable", "no home"])
def test_an_invalid_interpreter_is_refused_with_a_reason(root: Path, case: str) -> None:
    python = root / "x/bin/python3"
    if case == "directory":
        python.mkdir(parents=True)
    elif case != "missing":
        program(python)
    if case == "not executable":
        os.chmod(python, 0o644)
    if case == "no home":
        (root / "x/pyvenv.cfg").write_text("version = 3.11\n")
    with pytest.raises(InvalidRequest, match=str(root / "x")) as caught:
        tree(python, root)
    assert caught.value.details["field"] == "python"


def test_the_etc_of_sandboxes_is_readable_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        etc = root_file_system.write_etc(tmp_path)
        (etc / "passwd").chmod(0o600)  # As an earlier version left it.
        root_file_system.write_etc(tmp_path)
    finally:
        os.umask(before)

    for path in (etc, *etc.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes what an overlay takes for absence")
def test_layers_appear_as_one_tree(tmp_path: Path) -> None:
    upper, lower, base = (tmp_path / name for name in ("upper", "lower", "base"))
    for place in ("usr/bin", "etc", "opt/one", "var", "gone"):
        (base / place).mkdir(parents=True)
    (base / "usr/bin/python3").touch()
    (base / "bin").symlink_to("usr/bin")
    (lower / "opt/two").mkdir(parents=True)
    (lower / "opt/atoll").mkdir()
    os.mknod(lower / "gone", 0o600 | stat.S_IFCHR, os.makedev(0, 0))
    (upper / "srv").mkdir(parents=True)

    tree = root_file_system.layered_root((upper, lower, base), "")

    assert [inside for _, inside in tree.binds] == ["/etc", "/srv", "/usr", "/opt/one", "/opt/two"]
    assert all(source == f"{LAYERED}{inside}" for source, inside in tree.binds)
    assert tree.links == (("usr/bin", "/bin"),)
    assert tree.python == "/usr/bin/python3"
    assert tree.layers == (str(upper), str(lower), str(base))
    os.setxattr(lower / "opt", "trusted.overlay.opaque", b"y")
    hidden = root_file_system.layered_root((upper, lower, base), "")
    assert [inside for _, inside in hidden.binds if "opt" in inside] == ["/opt/two"]


def test_the_interpreter_of_an_image_is_found_without_following_links_to_this_machine(
    root: Path,
) -> None:
    image, outside = root / "image", root / "outside"
    (image / "usr" / "bin").mkdir(parents=True)
    (image / "usr" / "bin" / "python3").touch()
    (image / "bin").symlink_to("/usr/bin")
    (image / "circle").symlink_to("circle")
    (image / "away").symlink_to(outside)
    (image / "up").symlink_to("../../../outside")
    outside.mkdir()
    (outside / "secret").touch()
    assert root_file_system.image_root(image, "/bin/python3").python == "/bin/python3"
    for path in ("/../outside/secret", "/away/secret", "/up/secret", "/circle/a", "/usr/none"):
        with pytest.raises(InvalidRequest, match="has no"):
            root_file_system.image_root(image, path)


@pytest.mark.parametrize("place", ["{root}/../outside", "{root}/circle/a", "/proc/1/root", "a"])
def test_a_path_that_leads_outside_or_does_not_exist_is_not_allowed(root: Path, place: str) -> None:
    (root / "circle").symlink_to("circle")
    named = template(image=place.format(root=root))
    with pytest.raises(InvalidRequest) as refused:
        root_file_system.check_allowed(named, (root,))
    assert refused.value.code == "place_not_allowed"
