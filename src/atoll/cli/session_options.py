"""
Options of `session create`, `update` and `clone`, and the SDK options that they stand for.

A new option of a session needs one line in a class here. An option whose name or notation differs
from the SDK's also needs a line in `create_options` or `update_options`.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from atoll.cli.option_parsing import environment, pairs, secrets, volumes
from atoll.cli.options import Env, LimitOptions

InstallTimeout = Annotated[
    int | None,
    typer.Option("--install-timeout", help="Seconds for installing packages. Default: 300."),
]
AllowVersionConflicts = Annotated[
    bool | None,
    typer.Option(
        "--allow-version-conflicts", help="Allow packages to replace the template's versions."
    ),
]


@dataclass(kw_only=True)
class SessionOptions(LimitOptions):
    env: Env = None
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="NAME=VALUE", help="Label of your own. Repeatable."),
    ] = None
    auto_start: Annotated[
        bool | None,
        typer.Option(
            "--auto-start/--no-auto-start",
            help="Start the session when a request needs it.",
        ),
    ] = None
    idle_timeout: Annotated[
        int | None,
        typer.Option(min=0, help="Seconds without requests before it is stopped; 0: never."),
    ] = None
    archive_after: Annotated[
        int | None, typer.Option(min=0, help="Seconds stopped before it is archived; 0: never.")
    ] = None
    delete_after: Annotated[
        int | None, typer.Option(min=0, help="Seconds stopped before it is deleted; 0: never.")
    ] = None


@dataclass(kw_only=True)
class NewSessionOptions(SessionOptions):
    timeout: Annotated[int | None, typer.Option(help="Lifetime in seconds.")] = None
    capacity: Annotated[
        int | None, typer.Option(min=1, help="Executions at the same time. Default: 1.")
    ] = None
    dependency: Annotated[
        list[str] | None,
        typer.Option("--dependency", "-d", help='Python package, like "pandas>=2". Repeatable.'),
    ] = None
    install_timeout: InstallTimeout = None
    allow_version_conflicts: AllowVersionConflicts = None
    secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Secret. Its value comes from the environment variable NAME, or a prompt. "
            "Repeatable.",
        ),
    ] = None
    secret_file: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="Secret with the content of a file. Repeatable."),
    ] = None
    volume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VOLUME:PATH[:ro|rw]", help="Volume; read-only unless rw. Repeatable."
        ),
    ] = None
    workspace_mode: Annotated[
        str | None, typer.Option(help="sync, or mount: mounted from the server's bucket.")
    ] = None
    durability: Annotated[
        str | None,
        typer.Option(help="background, or execution: a checkpoint precedes each result."),
    ] = None
    started_from: Annotated[
        str | None,
        typer.Option("--from", metavar="SESSION", help="Start with the files of this session."),
    ] = None


@dataclass(kw_only=True)
class ChangedSessionOptions(SessionOptions):
    timeout: Annotated[int | None, typer.Option(help="New lifetime in seconds, from now on.")] = (
        None
    )
    no_env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Remove this environment variable. Repeatable."),
    ] = None
    no_label: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Remove this label. Repeatable.")
    ] = None


def create_options(options: NewSessionOptions) -> dict[str, Any]:
    """The options of `sessions.create`."""
    given: dict[str, Any] = dict(vars(options))
    return {
        "env": environment(given.pop("env")),
        "labels": pairs(given.pop("label"), "--label"),
        "secrets": secrets(given.pop("secret"), given.pop("secret_file")),
        "volumes": volumes(given.pop("volume")),
        "dependencies": given.pop("dependency"),
        **given,
    }


def update_options(options: ChangedSessionOptions) -> dict[str, Any]:
    """The options of `session.update` and `session.clone`."""
    given: dict[str, Any] = dict(vars(options))
    env: dict[str, str | None] = {**environment(given.pop("env"))}
    labels: dict[str, str | None] = {**pairs(given.pop("label"), "--label")}
    return {
        "env": env | dict.fromkeys(given.pop("no_env") or ()),
        "labels": labels | dict.fromkeys(given.pop("no_label") or ()),
        **given,
    }
