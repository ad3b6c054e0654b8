"""The documentation holds: generated parts are fresh, links lead somewhere, codes are explained."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"""\bcode\s*=\s*"([a-z_]+)\"""")


def text_of(page: Path) -> str:
    """A page without its blocks of code, where brackets and hashes mean something else."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The names that headings get."""
    found: set[str] = set()
    for heading in HEADING.findall(text_of(page)):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        name, number = words, 0
        while name in found:
            number += 1
            name = f"{words}-{number}"
        found.add(name)
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("program", [["scripts/generate-docs"], ["-m", "bench.page"]], ids=str)
def test_generated_pages_are_up_to_date(program: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *program, "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_has_a_target(page: Path) -> None:
    broken = []
    for link in LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)

    assert broken == []


def test_every_error_code_is_in_the_rest_reference() -> None:
    explained = (ROOT / "docs" / "reference" / "rest.md").read_text()
    used = {
        code
        for module in (ROOT / "src" / "atoll").rglob("*.py")
        for code in CODE.findall(module.read_text())
    }

    assert used
    assert sorted(code for code in used if f"`{code}`" not in explained) == []
