"""How an executor gets its configuration."""

from __future__ import annotations

import subprocess
import sys

IMPATIENT = """
import sys
import atoll.executor.__main__ as executor
executor.CONFIG_TIMEOUT = 0.05
sys.argv = ["executor", "-"]
executor.main()
"""


def test_an_executor_that_is_not_configured_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", IMPATIENT],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.wait(30) == 1
        assert started.stderr is not None
        assert "does not configure it" in started.stderr.read()
