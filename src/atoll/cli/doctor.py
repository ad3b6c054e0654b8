"""`atoll doctor`."""

import typer

from atoll.cli import exit_codes, output
from atoll.cli.options import DataDir, Json, settings


def doctor(data_dir: DataDir = None, json: Json = False) -> None:
    """Check which isolation this machine provides, what is missing, and how to fix it."""
    chosen = settings(data_dir=data_dir)
    from atoll.app import doctor as host

    checks = host.doctor(chosen)
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
        paragraph, ways = host.advice(chosen, checks)
        if paragraph:
            output.line("")
            output.paragraph(paragraph)
        for name, words in ways:
            output.paragraph(words, f"    {name:<9}")
    if any(check.essential and not check.ok for check in checks):
        raise typer.Exit(exit_codes.FAILED)
