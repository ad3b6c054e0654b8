"""Options that several commands share, and the client or the settings that they lead to."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from atoll.cli import output
from atoll.cli.completion import session_ids, template_ids

if TYPE_CHECKING:
    from atoll.sdk.sync import Atoll
    from atoll.settings import Settings

DEFAULT_URL = "http://127.0.0.1:8000"

T = TypeVar("T")
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
Cwd = Annotated[str | None, typer.Option(help="Working directory. Default: /workspace.")]
Follow = Annotated[
    bool,
    typer.Option("--follow/--no-follow", help="Wait for the end, or print the id and return."),
]
OfSession = Annotated[
    str | None,
    typer.Option("--session", autocompletion=session_ids, help="Only those of this session."),
]
Status = Annotated[str | None, typer.Option(help="Only those with this status.")]
Limit = Annotated[int, typer.Option(min=1, help="Maximum number to list.")]


def command_group(help: str) -> typer.Typer:
    return typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None)


@dataclass(kw_only=True)
class LimitOptions:
    """Resource limits of a session."""

    cpu: Cpu = None
    memory: Memory = None
    disk: Disk = None
    max_processes: MaxProcesses = None


@dataclass(kw_only=True)
class ProgramOptions:
    """How `run` and `session exec` run a program."""

    event: Annotated[
        str | None, typer.Option(metavar="JSON", help="Argument for the code's handler().")
    ] = None
    timeout: Timeout = None
    env: Env = None
    stdin: Annotated[
        bool | None,
        typer.Option("--stdin/--no-stdin", help="Pass stdin to the program. Default: if piped."),
    ] = None


def flat(command: Callable[..., T]) -> Callable[..., T]:
    """
    The command with a parameter for each field of its dataclasses, because Typer knows only
    parameters. Help lists the fields where the command has the dataclass.
    """
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        if is_dataclass(group := parameter.annotation):
            groups[parameter.name] = group
            parameters += [option(field.name, field.type, field.default) for field in fields(group)]
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    def call(**given: Any) -> T:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        return command(**given)

    return declare(call, command, parameters)


def option(name: str, annotation: Any, default: Any = None) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def declare(call: F, command: Callable[..., Any], parameters: list[Parameter]) -> F:
    """Show `call` to Typer with the name and help of the command and with these parameters."""
    wraps(command)(call)
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def connect(url: str | None, api_key: str | None, timeout: float = 30.0) -> "Atoll":
    """A client of a server. Never starts an embedded one."""
    from atoll.sdk.sync import Atoll

    return Atoll(address(url), api_key=api_key, timeout=timeout)


def address(url: str | None) -> str:
    """The URL of the server: --url, ATOLL_URL or the default."""
    from atoll.sdk.endpoint import server_url

    return server_url(url or None) or DEFAULT_URL


def settings(**given: Any) -> "Settings":
    """The server's settings."""
    from atoll.settings import Settings

    return Settings.read(**given)
