"""
Helm, and Atoll's chart.

Started as a program, `python -m tests.servers.kubernetes.helm`, it runs Helm with its arguments.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.servers.kubernetes import binaries
from tests.servers.kubernetes.go_programs import BuildFailed

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
CHART, MANIFESTS = DEPLOY / "helm/atoll", DEPLOY / "kubernetes"


class Helm:
    """`place` is for the program and its files."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.program = binaries.helm().unpack(place)["helm"]

    def run(self, *arguments: str, kubeconfig: Path | None = None) -> str:
        """Its output; the exception of a failure has its error output."""
        env = {**os.environ, "HOME": str(self._place), "HELM_BURST_LIMIT": "1000"}
        if kubeconfig is not None:
            env["KUBECONFIG"] = str(kubeconfig)
        try:
            done = subprocess.run(
                [self.program, *arguments],
                capture_output=True,
                text=True,
                check=True,
                timeout=600,
                env=env,
            )
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)
            raise
        return done.stdout

    def render(self, values: Path, *options: str, namespace: str = "atoll") -> list[dict[str, Any]]:
        """The objects of a release named `atoll`."""
        text = self.run(
            "template", "atoll", str(CHART), "--namespace", namespace, "--values", str(values),
            *options,
        )  # fmt: skip
        return [found for found in yaml.safe_load_all(text) if found is not None]


def main(arguments: list[str]) -> int:
    programs = binaries.helm()
    programs.build()
    with tempfile.TemporaryDirectory() as directory:
        program = programs.unpack(Path(directory))["helm"]
        return subprocess.run([program, *arguments], check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BuildFailed as failed:
        sys.exit(str(failed))
