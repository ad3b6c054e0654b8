"""A real `atoll serve` to measure, by default on a data directory of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from bench.client import Client

ATOLL = str(Path(sys.executable).with_name("atoll"))


class Server:
    def __init__(self, program: str = ATOLL, data_dir: str = "", **env: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="atoll-bench-")
        self.data_dir = Path(data_dir or self._directory.name)
        self._program = program
        self._env = env
        self.host, self.port, self.key = "127.0.0.1", 0, ""

    def __enter__(self) -> Self:
        command = [self._program, "serve", "--port", "0", "--stop-sessions"]
        self.process = subprocess.Popen(
            [*command, "--data-dir", str(self.data_dir)],
            stdout=subprocess.PIPE,
            text=True,
            # It takes the note of its data directory with it.
            env={**os.environ, "XDG_STATE_HOME": self._directory.name, **self._env},
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"listens on http://[^:]+:(\d+)", line):
                self.port = int(found[1])
                self.key = (self.data_dir / "key").read_text().strip()
                return self
        raise RuntimeError("the server did not start")

    def __exit__(self, *error: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)
        self._directory.cleanup()

    def client(self) -> Client:
        return Client(self.host, self.port, self.key)
