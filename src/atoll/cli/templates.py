"""`atoll template …`."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack

import typer

from atoll.cli import output
from atoll.cli.build_progress import follow
from atoll.cli.completion import template_ids
from atoll.cli.option_parsing import environment
from atoll.cli.options import ApiKey, Env, Json, LimitOptions, Url, connect, expand_options
from atoll.errors import InvalidRequest, NotFound

app = typer.Typer(
    help="Templates that sessions start from.", no_args_is_help=True, rich_markup_mode=None
)

PASSWORD = "ATOLL_REGISTRY_PASSWORD"  # noqa: S105 - the name of a variable

TemplateId = Annotated[
    str, typer.Argument(metavar="TEMPLATE", help="Template id.", autocompletion=template_ids)
]


@app.command("list")
def list_(url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """List templates."""
    with connect(url, api_key) as atoll:
        templates = list(atoll.templates.list())
    if json:
        output.as_json(templates)
        return
    output.table(
        ("TEMPLATE", "NAME", "CPU", "MEMORY", "DISK", "POOL", "IMAGE"),
        [
            (
                template.id,
                template.name,
                template.default_resources.cpu,
                template.default_resources.memory,
                template.default_resources.disk,
                template.pool_size,
                template.image or "(this machine)",
            )
            for template in templates
        ],
    )


@app.command()
def show(
    template_id: TemplateId, url: Url = None, api_key: ApiKey = None, json: Json = False
) -> None:
    """Show a template."""
    with connect(url, api_key) as atoll:
        template = atoll.templates.get(template_id)
    output.as_json(template) if json else output.details(template)


class BuildOptions(TypedDict):
    """What a template adds to its base image."""

    debian_package: Annotated[
        list[str] | None, typer.Option(help="Debian package to install. Repeatable.")
    ]
    python_package: Annotated[
        list[str] | None, typer.Option(help="Python package to install (PEP 508). Repeatable.")
    ]
    preload: Annotated[
        list[str] | None,
        typer.Option(help="Module that the interpreter imports beforehand. Repeatable."),
    ]
    pool_size: Annotated[int | None, typer.Option(min=0, help="Minimum of ready instances.")]
    pool_max: Annotated[int | None, typer.Option(min=0, help="Maximum of ready instances.")]


class TemplateOptions(BuildOptions, LimitOptions):
    base_image: Annotated[
        str | None,
        typer.Option(help="Base for packages: a root file system directory, or template:ID."),
    ]
    image: Annotated[
        str | None,
        typer.Option(help="Root file system directory on the node, or the name of an image."),
    ]
    dockerfile: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Dockerfile to build the image from."),
    ]
    context: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Directory with the files that it copies."),
    ]
    runtime: Annotated[str | None, typer.Option(help="OCI runtime, such as runsc.")]
    registry_server: Annotated[
        str | None, typer.Option(help="Registry of the credentials. Default: the image's.")
    ]
    registry_user: Annotated[
        str | None,
        typer.Option(
            help="User name at the registry. The password comes from ATOLL_REGISTRY_PASSWORD or "
            "stdin."
        ),
    ]
    python: Annotated[str | None, typer.Option(help="Path of the interpreter.")]
    require: Annotated[
        list[str] | None, typer.Option(help="Isolation that a node must provide. Repeatable.")
    ]
    env: Env


@app.command()
@expand_options
def create(
    name: Annotated[str, typer.Argument(help="Name for people.")],
    template_id: Annotated[
        str | None, typer.Option("--id", help="Template id. Default: chosen by the server.")
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
    **options: Unpack[TemplateOptions],
) -> None:
    """Create a template and print its id."""
    given = _build_options(options)
    given["registry"] = _credentials(given.pop("registry_server"), given.pop("registry_user"))
    given["env"] = environment(given["env"]) or None
    if (dockerfile := options["dockerfile"]) is not None:
        given["dockerfile"] = dockerfile.read_text(encoding="utf-8")
    with connect(url, api_key) as atoll:
        template = atoll.templates.create(name, template_id=template_id, **given)
    output.as_json(template) if json else output.line(template.id)


def _build_options(options: BuildOptions) -> dict[str, Any]:
    """The options with their names in the SDK."""
    given: dict[str, Any] = {**options}
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
@expand_options
def build(
    name: Annotated[str, typer.Argument(help="Template id. Created if it does not exist.")],
    base: Annotated[
        str | None,
        typer.Option(help="Root file system directory on the node, or template:ID."),
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
    **options: Unpack[BuildOptions],
) -> None:
    """
    Create a template with packages, or a new version of an existing one, and follow its build.

    Without options, rebuild the existing template with the current versions of its packages.
    """
    given = {"base_image": base, **_build_options(options)}
    given = {name: value for name, value in given.items() if value is not None}
    with connect(url, api_key) as atoll:
        try:
            template = atoll.templates.get(name)
        except NotFound:
            if not given:
                raise  # Without options a misspelt id is more likely than an empty template.
            template = atoll.templates.create(name, template_id=name, **given)
        else:
            if given:
                template = atoll.templates.update(name, **given)
            else:
                template = atoll.templates.build(name)
        events = atoll.templates.follow(template.id, template.version)
        follow(events, f"{template.id} version {template.version}", quiet=json)
        template = atoll.templates.version(template.id, template.version)
    if json:
        output.as_json(template)
    elif template.status == "ready":
        output.line(f"{template.id} version {template.version}")
    else:
        output.error(template.message or "The build failed.", "build_failed")
    if template.status != "ready":
        raise typer.Exit(1)


@app.command()
def versions(
    template_id: TemplateId, url: Url = None, api_key: ApiKey = None, json: Json = False
) -> None:
    """List the versions of a template, newest first."""
    with connect(url, api_key) as atoll:
        found = list(atoll.templates.versions(template_id))
    if json:
        output.as_json(found)
        return
    output.table(
        ("VERSION", "STATUS", "AGE", "PACKAGES", "MESSAGE"),
        [
            (
                version.version,
                version.status,
                output.age(version.updated_at),
                " ".join((*version.debian_packages, *version.python_packages)),
                (version.message or "").partition("\n")[0],
            )
            for version in found
        ],
    )


@app.command()
def log(
    template_id: TemplateId,
    version: Annotated[
        int | None, typer.Option(min=1, help="Version. Default: the newest.")
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Print the output of a template's build."""
    with connect(url, api_key) as atoll:
        text = atoll.templates.log(template_id, version)
    typer.echo(output.visible(text), nl=False)


@app.command()
def rm(
    template_id: Annotated[
        list[str],
        typer.Argument(metavar="TEMPLATE...", help="Template ids.", autocompletion=template_ids),
    ],
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Remove templates. Their sessions keep running."""
    with connect(url, api_key) as atoll:
        for one in template_id:
            atoll.templates.delete(one)
    output.removed(template_id, json=json)
