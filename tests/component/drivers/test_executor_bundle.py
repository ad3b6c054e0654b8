"""The executor's bundle, imported as in an instance."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from atoll.drivers.shared import executor_bundle
from atoll.executor.bundle_import import INDEX

if TYPE_CHECKING:
    from pathlib import Path

IMPORT = """
import sys
sys.path.insert(0, sys.argv[1])
import atoll_executor.executor.supervisor as supervisor
import atoll_executor.executor.files as package
print(type(supervisor.__loader__).__name__, package.__path__[0] == sys.argv[2])
"""


@pytest.mark.parametrize("version", ["this", "another"])
def test_modules_are_imported_by_index_or_else_by_zipimport(tmp_path: Path, version: str) -> None:
    bundle = executor_bundle.build()
    if version == "another":
        # As long as the name for this version, so that the offsets stay right.
        bundle = bundle.replace(INDEX.encode(), b"x" * len(INDEX))
    path = tmp_path / "executor.pyz"
    path.write_bytes(bundle)

    package = f"{path}/atoll_executor/executor/files"
    command = [sys.executable, "-I", "-S", "-B", "-c", IMPORT, str(path), package]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    loader = {"this": "BundleFinder", "another": "zipimporter"}[version]
    assert output == f"{loader} True\n"


def test_the_same_modules_give_the_same_bundle() -> None:
    assert executor_bundle.build() == executor_bundle.build()
