"""Options that several commands share, and the client or the settings that they lead to."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar, get_args

import typer

from atoll.cli import output
from atoll.cli.completion import session_ids, template_ids

if TYPE_CHECKING:
    from atoll.sdk.sync import Atoll
    from atoll.settings import Settings

DEFAULT_URL = "http://127.0.0.1:8000"

F = TypeVar("F", bound=Callable[..., Any])

Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print JSON; errors too, on stderr.",
        callback=output.errors_as_json,
        is_eager=True,
    ),
]
JsonLines = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print JSON, one object per line.",
        callback=output.errors_as_json,
        is_eager=True,
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        help=f"URL of the server. Default: ATOLL_URL, then {DEFAULT_URL}.",
        metavar="URL",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        help="API key. Default: ATOLL_API_KEY, then the key file of a server on this machine.",
        metavar="KEY",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Data directory of the server. Default: ATOLL_DATA_DIR."),
]
SessionId = Annotated[
    str, typer.Argument(metavar="SESSION", help="Session id.", autocompletion=session_ids)
]
Template = Annotated[
    str | None, typer.Option("--template", autocompletion=template_ids, help="Template id.")
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        "-e",
        metavar="NAME=VALUE",
        help="Environment variable. NAME alone takes the value from your environment. Repeatable.",
    ),
]
Cpu = Annotated[str | None, typer.Option("--cpu", help='Cores, like "1", "0.5" or "500m".')]
Memory = Annotated[str | None, typer.Option("--memory", help='Memory, like "512Mi".')]
Disk = Annotated[str | None, typer.Option("--disk", help='Workspace size, like "1Gi".')]
MaxProcesses = Annotated[
    int | None, typer.Option("--max-processes", help="Maximum number of processes and threads.")
]
Timeout = Annotated[
    float | None, typer.Option("--timeout", "-t", help="Seconds that the program may run.")
]
Status = Annotated[str | None, typer.Option(help="Only those with this status.")]
Limit = Annotated[int, typer.Option(min=1, help="Maximum number to list.")]


class LimitOptions(TypedDict):
    """Resource limits of a session."""

    cpu: Cpu
    memory: Memory
    disk: Disk
    max_processes: MaxProcesses


class ProgramOptions(TypedDict):
    """How `run` and `session exec` run a program."""

    event: Annotated[
        str | None, typer.Option(metavar="JSON", help="Argument for the code's handler().")
    ]
    timeout: Timeout
    env: Env
    stdin: Annotated[
        bool | None,
        typer.Option("--stdin/--no-stdin", help="Pass stdin to the program. Default: if piped."),
    ]


def expand_options(command: F) -> F:
    """
    Give Typer one parameter per key of the command's `**options: Unpack[…]`. They are optional, and
    help lists them before the options that choose the server.
    """
    [kind] = get_args(command.__annotations__["options"])
    declared = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command).parameters.values()
        if parameter.name != "options"
    ]
    expanded = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in kind.__annotations__.items()
    ]
    names = [parameter.name for parameter in declared]
    at = names.index("url") if "url" in names else len(names)
    signature = inspect.Signature([*declared[:at], *expanded, *declared[at:]])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return command


def connect(url: str | None, api_key: str | None, timeout: float = 30.0) -> "Atoll":
    """A client of a server. Never starts an embedded one."""
    from atoll.sdk.sync import Atoll

    return Atoll(
        url or os.environ.get("ATOLL_URL") or DEFAULT_URL, api_key=api_key, timeout=timeout
    )


def settings(**given: Any) -> "Settings":
    """The server's settings."""
    from atoll.settings import Settings

    return Settings.read(**given)
