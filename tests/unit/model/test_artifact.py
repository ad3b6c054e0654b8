from __future__ import annotations

import pytest

from atoll.model.artifact import artifact_type


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("a.txt", "artifact"), ("run.log", "log"), ("RUN.LOG", "log"), ("logs/a.txt", "log"),
        ("a/logs/b/c", "log"), ("output/a", "output"), ("a/outputs/b/c", "output"),
        ("output/run.log", "log"), ("logs/output/a", "log"), ("output", "artifact"),
        ("logs", "artifact"), ("output.txt", "artifact"), ("my-output/a", "artifact"),
        ("log/a", "artifact"), (".log", "log"), ("", "artifact"),
        ("/workspace/output/a", "output"),
    ],
)  # fmt: skip
def test_the_path_determines_the_kind(path: str, kind: str) -> None:
    assert artifact_type(path) == kind
