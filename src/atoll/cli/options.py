"""Options that several commands share, and what they lead to: a client or the server's settings."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import output

if TYPE_CHECKING:
    from atoll.sdk.sync import Atoll
    from atoll.settings import Settings

DEFAULT_URL = "http://127.0.0.1:8000"

Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print JSON, errors too (on stderr).",
        callback=output.errors_as_json,
        is_eager=True,
    ),
]
Url = Annotated[
    str | None,
    typer.Option("--url", help=f"The server; else ATOLL_URL, else {DEFAULT_URL}.", metavar="URL"),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        help="Its key; else ATOLL_API_KEY, else for a server on this machine the one it keeps.",
        metavar="KEY",
    ),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Where the server keeps its data; ATOLL_DATA_DIR.")
]
Env = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="May be repeated.")
]
Cpu = Annotated[str | None, typer.Option("--cpu", help='Cores: "1", "0.5", "500m".')]
Memory = Annotated[str | None, typer.Option("--memory", help='Like "512Mi".')]
Disk = Annotated[str | None, typer.Option("--disk", help='Size of the workspace, like "1Gi".')]
Capacity = Annotated[
    int | None, typer.Option("--capacity", min=1, help="Executions at the same time; 1.")
]
MaxProcesses = Annotated[int | None, typer.Option("--max-processes", help="With threads.")]


def connect(url: str | None, api_key: str | None, timeout: float = 30.0) -> "Atoll":
    """A client of a server that runs by itself."""
    from atoll.sdk.sync import Atoll

    return Atoll(
        url or os.environ.get("ATOLL_URL") or DEFAULT_URL, api_key=api_key, timeout=timeout
    )


def settings(**given: Any) -> "Settings":
    """The server's settings."""
    from atoll.settings import Settings

    return Settings.read(**given)


def environment(pairs: Iterable[str] | None) -> dict[str, str]:
    """From `NAME=VALUE`; a `NAME` alone takes its value from here, as other tools do."""
    found: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not name or (not equals and name not in os.environ):
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE.", param_hint="--env")
        found[name] = value if equals else os.environ[name]
    return found
