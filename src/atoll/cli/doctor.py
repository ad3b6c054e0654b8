"""`atoll doctor`."""

from enum import StrEnum
from typing import Annotated

import typer

from atoll.cli import exit_codes, output
from atoll.cli.options import DataDir, Json, settings


class CheckedDriver(StrEnum):
    LOCAL = "local"
    KUBERNETES = "kubernetes"


Driver = Annotated[
    CheckedDriver | None,
    typer.Option(help="Check this machine, or a cluster. By default what ATOLL_DRIVER chooses."),
]


def doctor(data_dir: DataDir = None, driver: Driver = None, json: Json = False) -> None:
    """Check which isolation this machine or cluster provides, what is missing, how to fix it."""
    chosen = settings(data_dir=data_dir)
    from atoll.app import doctor as host

    of_cluster = (driver or chosen.driver) == CheckedDriver.KUBERNETES
    if of_cluster:
        from atoll.app.logs import configure_logging

        # Not on stdout, where a program reads the checks.
        configure_logging("warning", as_json=False)
    checks = host.cluster(chosen) if of_cluster else host.machine(chosen)
    if json:
        output.as_json(checks)
    else:
        marks = {True: "ok", False: "missing"}
        rows = [
            (
                "FAILED" if check.essential and not check.ok else marks[check.ok],
                check.name,
                check.detail,
            )
            for check in checks
        ]
        output.table(("", "CHECK", ""), rows)
        for check in checks:
            if not check.ok and check.fix and not check.unprivileged:
                output.line("")
                output.line(f"{check.name}: to fix it, run")
                output.line(f"    {check.fix}")
        paragraph, ways = ("", []) if of_cluster else host.advice(chosen, checks)
        if paragraph:
            output.line("")
            output.paragraph(paragraph)
        for name, words in ways:
            output.paragraph(words, f"    {name:<9}")
    if any(check.essential and not check.ok for check in checks):
        raise typer.Exit(exit_codes.FAILED)
