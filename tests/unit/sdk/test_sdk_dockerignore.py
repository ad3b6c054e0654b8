"""Files that a `.dockerignore` excludes."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

import pytest

from atoll import InvalidRequest
from atoll.sdk import dockerignore
from atoll.sdk.tar_pack import TarPacker

if TYPE_CHECKING:
    from pathlib import Path

FILES = (
    ".env",
    "a.md",
    "a.py",
    "b[1].py",
    "docs/README.md",
    "docs/deep/er/notes.md",
    "docs/plan.md",
    "src/.git/config",
    "src/a.pyc",
    "src/temp/kept",
    "temp",
    "tempa/x",
)


@pytest.mark.parametrize(
    ("lines", "left_out"),
    [
        ("", ()),
        ("# .env\n\n   \n", ()),
        (".env", (".env",)),
        ("/.env\n./a.md\n src/../a.py ", (".env", "a.md", "a.py")),
        ("*.md", ("a.md",)),
        ("**/*.md", ("a.md", "docs/README.md", "docs/deep/er/notes.md", "docs/plan.md")),
        ("docs", ("docs/README.md", "docs/deep/er/notes.md", "docs/plan.md")),
        ("docs/", ("docs/README.md", "docs/deep/er/notes.md", "docs/plan.md")),
        ("docs\n!docs/README.md", ("docs/deep/er/notes.md", "docs/plan.md")),
        ("docs/*.md\n!docs/README.md\n**/README*", ("docs/README.md", "docs/plan.md")),
        ("*\n!a.*\na.md", tuple(name for name in FILES if name != "a.py")),
        ("**", FILES),
        ("temp?", ("tempa/x",)),
        ("*/temp*", ("src/temp/kept",)),
        ("**/.git", ("src/.git/config",)),
        ("docs/**/notes.md", ("docs/deep/er/notes.md",)),
        ("docs/**/plan.md", ("docs/plan.md",)),
        ("[a-b].py", ("a.py",)),
        ("[^a].md", ()),
        ("b\\[1\\].py", ("b[1].py",)),
        ("b[1].py", ()),
        ("a+md", ()),
    ],
)
def test_the_same_files_are_excluded_as_by_docker(
    lines: str, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / dockerignore.FILE).write_text(lines)
    packed = io.BytesIO(b"".join(TarPacker(tmp_path, dockerignore.read(tmp_path))))
    with tarfile.open(fileobj=packed) as archive:
        names = {member.name for member in archive if member.isfile()}
    assert set(FILES) - names == set(left_out)


def test_an_invalid_dockerignore_is_an_error(tmp_path: Path) -> None:
    assert "anything" not in dockerignore.read(tmp_path)
    (tmp_path / dockerignore.FILE).write_text("a\n[z-a]\n")
    with pytest.raises(InvalidRequest, match=r"Line 2 of .dockerignore, \[z-a\]"):
        dockerignore.read(tmp_path)
    (tmp_path / dockerignore.FILE).write_bytes(b"#" * (dockerignore.MAX_SIZE + 1))
    with pytest.raises(InvalidRequest, match="larger"):
        dockerignore.read(tmp_path)
