"""`atoll template …`."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import exit_codes, output
from atoll.cli.completion import template_ids
from atoll.cli.option_parsing import environment
from atoll.cli.options import Env, Json, LimitOptions, command_group
from atoll.cli.remote import connected, remote
from atoll.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from atoll.sdk.sync import Atoll
    from atoll.sdk.values import BuildEvent, TemplateInfo

app = command_group("Templates that sessions start from.")

PASSWORD = "ATOLL_REGISTRY_PASSWORD"  # noqa: S105 - the name of a variable

TemplateId = Annotated[
    str, typer.Argument(metavar="TEMPLATE", help="Template id.", autocompletion=template_ids)
]


@app.command("list")
@remote(
    table={
        "TEMPLATE": "id",
        "NAME": "name",
        "CPU": "default_resources.cpu",
        "MEMORY": "default_resources.memory",
        "DISK": "default_resources.disk",
        "POOL": "pool_size",
        "IMAGE": lambda template: template.image or "(this machine)",
    }
)
def list_(atoll: "Atoll") -> "Iterator[TemplateInfo]":
    """List templates."""
    return atoll.templates.list()


@app.command()
@remote()
def show(atoll: "Atoll", template_id: TemplateId) -> "TemplateInfo":
    """Show a template."""
    return atoll.templates.get(template_id)


@dataclass(kw_only=True)
class BuildOptions:
    """What a template adds to its base image."""

    debian_package: Annotated[
        list[str] | None, typer.Option(help="Debian package to install. Repeatable.")
    ] = None
    python_package: Annotated[
        list[str] | None, typer.Option(help="Python package to install (PEP 508). Repeatable.")
    ] = None
    preload: Annotated[
        list[str] | None,
        typer.Option(help="Module that the interpreter imports beforehand. Repeatable."),
    ] = None
    pool_size: Annotated[int | None, typer.Option(min=0, help="Minimum of ready instances.")] = None
    pool_max: Annotated[int | None, typer.Option(min=0, help="Maximum of ready instances.")] = None


@dataclass(kw_only=True)
class TemplateOptions:
    base_image: Annotated[
        str | None,
        typer.Option(help="Base for packages: a root file system directory, or template:ID."),
    ] = None
    image: Annotated[
        str | None,
        typer.Option(help="Root file system directory on the node, or the name of an image."),
    ] = None
    dockerfile: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Dockerfile to build the image from."),
    ] = None
    context: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Directory with the files that it copies."),
    ] = None
    runtime: Annotated[str | None, typer.Option(help="OCI runtime, such as runsc.")] = None
    registry_server: Annotated[
        str | None, typer.Option(help="Registry of the credentials. Default: the image's.")
    ] = None
    registry_user: Annotated[
        str | None,
        typer.Option(
            help="User name at the registry. The password comes from ATOLL_REGISTRY_PASSWORD or "
            "stdin."
        ),
    ] = None
    python: Annotated[str | None, typer.Option(help="Path of the interpreter.")] = None
    require: Annotated[
        list[str] | None, typer.Option(help="Isolation that a node must provide. Repeatable.")
    ] = None
    env: Env = None


@app.command()
@remote(line="id")
def create(
    atoll: "Atoll",
    name: Annotated[str, typer.Argument(help="Name for people.")],
    template_id: Annotated[
        str | None, typer.Option("--id", help="Template id. Default: chosen by the server.")
    ] = None,
    *,
    build: BuildOptions,
    limits: LimitOptions,
    options: TemplateOptions,
) -> "TemplateInfo":
    """Create a template and print its id."""
    given = {**_build_options(build), **vars(limits), **vars(options)}
    given["registry"] = _credentials(given.pop("registry_server"), given.pop("registry_user"))
    given["env"] = environment(options.env) or None
    if options.dockerfile is not None:
        given["dockerfile"] = options.dockerfile.read_text(encoding="utf-8")
    return atoll.templates.create(name, template_id=template_id, **given)


def _build_options(options: BuildOptions) -> dict[str, Any]:
    """The options with their names in the SDK."""
    given = dict(vars(options))
    for kind in ("debian_package", "python_package"):
        given[f"{kind}s"] = given.pop(kind)
    return given


def _credentials(server: str | None, user: str | None) -> dict[str, str] | None:
    """Registry credentials. Other users can read command lines, so the password is no option."""
    if user is None:
        if server is not None:
            raise InvalidRequest("--registry-server needs --registry-user.")
        return None
    password = os.environ.get(PASSWORD)
    if password is None and sys.stdin.isatty():
        password = typer.prompt(f"Password of {user}", hide_input=True, err=True)
    elif password is None:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        raise InvalidRequest(f"No password: set {PASSWORD}, or write it to stdin.")
    found = {"username": user, "password": password}
    return found if server is None else {**found, "server": server}


@app.command()
@connected
def build(
    atoll: "Atoll",
    name: Annotated[str, typer.Argument(help="Template id. Created if it does not exist.")],
    base: Annotated[
        str | None,
        typer.Option(help="Root file system directory on the node, or template:ID."),
    ] = None,
    *,
    options: BuildOptions,
    json: Json = False,
) -> None:
    """
    Create a template with packages, or a new version of an existing one, and follow its build.

    Without options, rebuild the existing template with the current versions of its packages.
    """
    given = {"base_image": base, **_build_options(options)}
    given = {name: value for name, value in given.items() if value is not None}
    templates = atoll.templates
    try:
        template = templates.get(name)
    except NotFound:
        if not given:
            raise  # Without options a misspelt id is more likely than an empty template.
        template = templates.create(name, template_id=name, **given)
    else:
        template = templates.update(name, **given) if given else templates.build(name)
    events = templates.follow(template.id, template.version)
    _follow(events, f"{template.id} version {template.version}", quiet=json)
    template = templates.version(template.id, template.version)
    if json:
        output.as_json(template)
    elif template.status == "ready":
        output.line(f"{template.id} version {template.version}")
    else:
        output.error(template.message or "The build failed.", "build_failed")
    if template.status != "ready":
        raise typer.Exit(exit_codes.FAILED)


def _follow(events: "Iterable[BuildEvent]", what: str, *, quiet: bool) -> None:
    """
    Show the output of a build on stderr until it has ended, and on a terminal a status line below.

    The output comes from packages, so control characters are escaped.
    """
    if quiet:
        for _ in events:
            pass
        return
    if not sys.stderr.isatty():
        for event in events:
            if event.text is not None:
                typer.echo(output.visible(event.text), nl=False, err=True)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, emoji=False)
    with console.status(Text(f"{what}: waiting")) as line:
        for event in events:
            if event.text is not None:
                console.print(Text(output.visible(event.text)), end="")
            if event.status is not None:
                attempt = f", attempt {event.attempts}" if event.attempts > 1 else ""
                line.update(Text(output.visible(f"{what}: {event.status}{attempt}")))


@app.command()
@remote(
    table={
        "VERSION": "version",
        "STATUS": "status",
        "AGE": "updated_at",
        "PACKAGES": lambda version: " ".join((*version.debian_packages, *version.python_packages)),
        "MESSAGE": lambda version: (version.message or "").partition("\n")[0],
    }
)
def versions(atoll: "Atoll", template_id: TemplateId) -> "Iterator[TemplateInfo]":
    """List the versions of a template, newest first."""
    return atoll.templates.versions(template_id)


@app.command()
@connected
def log(
    atoll: "Atoll",
    template_id: TemplateId,
    version: Annotated[
        int | None, typer.Option(min=1, help="Version. Default: the newest.")
    ] = None,
) -> None:
    """Print the output of a template's build."""
    text = atoll.templates.log(template_id, version)
    typer.echo(output.visible(text), nl=False)


@app.command()
@remote(show=output.removed)
def rm(
    atoll: "Atoll",
    template_id: Annotated[
        list[str],
        typer.Argument(metavar="TEMPLATE...", help="Template ids.", autocompletion=template_ids),
    ],
) -> dict[str, list[str]]:
    """Remove templates. Their sessions keep running."""
    for one in template_id:
        atoll.templates.delete(one)
    return {"removed": template_id}
