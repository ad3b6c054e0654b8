"""
`make bench-files`: files, checkpoints, packages and what durability costs, beside what this machine
has for the same work.

Loopback only, unless `--heavy` names packages of the index that pip is configured with. Needs an
otherwise idle machine to mean anything; with few rounds, p99 is the slowest of them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bench import durability, packages, saves, transfers
from bench.report import Report, parser

if TYPE_CHECKING:
    import argparse

PARTS = ("transfers", "checkpoints", "packages", "durability")


def arguments() -> argparse.Namespace:
    options = parser("files", __doc__)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--size", type=int, default=256, help="of the large file, in MiB")
    options.add_argument("--small", type=int, default=1000, help="how many small files are copied")
    options.add_argument("--files", type=int, default=10_000, help="in a checkpoint")
    options.add_argument("--rounds", type=int, default=5, help="how often each is done")
    options.add_argument("--executions", type=int, default=200, help="for what durability costs")
    options.add_argument("--heavy", nargs="+", default=[], metavar="NAME==VERSION")
    options.add_argument("--place", type=Path, help="a directory on the disk that is measured")
    return options.parse_args()


def main() -> None:
    given = arguments()
    if given.place is not None:
        tempfile.tempdir = str(given.place)  # The servers' data too.
    with (
        Report("files", given.json) as report,
        tempfile.TemporaryDirectory(prefix="atoll-bench-") as directory,
    ):
        place = Path(directory)
        if "transfers" in given.parts:
            transfers.measure(
                report, place, size=given.size, small=given.small, rounds=given.rounds
            )
        if "checkpoints" in given.parts:
            saves.measure(report, place, files=given.files, rounds=given.rounds)
        if "packages" in given.parts:
            packages.measure(report, place, rounds=given.rounds, heavy=given.heavy)
        if "durability" in given.parts:
            durability.measure(report, place, executions=given.executions)


if __name__ == "__main__":
    main()
