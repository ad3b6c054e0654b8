"""The list of files that an execution changed."""

from __future__ import annotations

from pathlib import Path

from atoll.executor.files import artifacts
from atoll.protocol import minijson


def test_the_list_is_bounded_by_its_length_as_json(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(10):
        deep = deep / ("d" * 200)
        deep.mkdir()
    for number in range(600):
        (deep / f"{number:03}").touch()
    listed, cut = artifacts.ArtifactScanner(str(tmp_path)).changed_since(0, 1000)
    for item in listed:
        item["sha256"] = "0" * 64
    assert cut
    assert artifacts.MAX_LIST - 4096 < len(minijson.dumps(listed)) <= artifacts.MAX_LIST + 4096


def test_a_list_within_the_limit_is_complete(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).touch()
    for limit, expected in ((3, (["a", "b", "c"], False)), (2, (["a", "b"], True))):
        listed, cut = artifacts.ArtifactScanner(str(tmp_path)).changed_since(0, limit)
        assert ([item["path"] for item in listed], cut) == expected
