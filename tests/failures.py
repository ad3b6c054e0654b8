"""A pytest plugin that writes each failure to the file at `TEST_FAILURES`, for `tests.run`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Workers send their reports to the main process, which calls this once more.
    if not report.failed or "PYTEST_XDIST_WORKER" in os.environ:
        return
    sections = [f"{title}\n{text}" for title, text in report.sections if text]
    line = {
        "id": report.nodeid,
        "when": report.when,
        "output": "\n".join([report.longreprtext, *sections]),
    }
    with Path(os.environ["TEST_FAILURES"]).open("a") as file:
        file.write(json.dumps(line) + "\n")
