"""`atoll template …`."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli import output
from atoll.cli.build_progress import follow
from atoll.cli.completion import template_ids
from atoll.cli.options import (
    ApiKey,
    Cpu,
    Disk,
    Env,
    Json,
    MaxProcesses,
    Memory,
    Url,
    connect,
    environment,
)
from atoll.errors import InvalidRequest, NotFound

app = typer.Typer(help="What sessions start from.", no_args_is_help=True, rich_markup_mode=None)

PASSWORD = "ATOLL_REGISTRY_PASSWORD"  # noqa: S105 - the name of a variable

TemplateId = Annotated[
    str, typer.Argument(metavar="TEMPLATE", help="Its id.", autocompletion=template_ids)
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
    """Show one template."""
    with connect(url, api_key) as atoll:
        template = atoll.templates.get(template_id)
    output.as_json(template) if json else output.details(template)


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="For people.")],
    template_id: Annotated[
        str | None, typer.Option("--id", help="By which sessions ask for it.")
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(help="Root file system directory on the node, or the name of an image."),
    ] = None,
    dockerfile: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Dockerfile to build the image from."),
    ] = None,
    context: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Directory that the Dockerfile copies."),
    ] = None,
    runtime: Annotated[str | None, typer.Option(help="OCI runtime, such as runsc.")] = None,
    registry_server: Annotated[
        str | None, typer.Option(help="Registry of the credentials; the image's by default.")
    ] = None,
    registry_user: Annotated[
        str | None,
        typer.Option(
            help="Name at the registry; the password is ATOLL_REGISTRY_PASSWORD, or read from "
            "stdin."
        ),
    ] = None,
    base_image: Annotated[
        str | None,
        typer.Option(
            help="What packages are installed on: a root file system directory, or template:ID."
        ),
    ] = None,
    python_package: Annotated[
        list[str] | None,
        typer.Option(help="A Python package to install (PEP 508); may be repeated."),
    ] = None,
    debian_package: Annotated[
        list[str] | None, typer.Option(help="A Debian package to install; may be repeated.")
    ] = None,
    python: Annotated[str | None, typer.Option(help="Path of the interpreter.")] = None,
    preload: Annotated[
        list[str] | None, typer.Option(help="A module to import beforehand; may be repeated.")
    ] = None,
    pool_size: Annotated[
        int | None, typer.Option(min=0, help="Instances to keep ready at least.")
    ] = None,
    pool_max: Annotated[
        int | None, typer.Option(min=0, help="Instances to keep ready at most.")
    ] = None,
    require: Annotated[
        list[str] | None, typer.Option(help="What a node must be able to give; may be repeated.")
    ] = None,
    cpu: Cpu = None,
    memory: Memory = None,
    disk: Disk = None,
    max_processes: MaxProcesses = None,
    env: Env = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Make a template and print its id."""
    variables = environment(env)
    registry = _credentials(registry_server, registry_user)
    text = None if dockerfile is None else dockerfile.read_text(encoding="utf-8")
    with connect(url, api_key) as atoll:
        template = atoll.templates.create(
            name,
            template_id=template_id,
            image=image,
            base_image=base_image,
            python_packages=python_package,
            debian_packages=debian_package,
            python=python,
            preload=preload,
            env=variables or None,
            pool_size=pool_size,
            pool_max=pool_max,
            cpu=cpu,
            memory=memory,
            disk=disk,
            max_processes=max_processes,
            require=require,
            runtime=runtime,
            dockerfile=text,
            context=context,
            registry=registry,
        )
    output.as_json(template) if json else output.line(template.id)


def _credentials(server: str | None, user: str | None) -> dict[str, str] | None:
    """Never from the command line, which other users of this machine can see."""
    if user is None:
        if server is not None:
            raise InvalidRequest("--registry-server: give --registry-user too.")
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
def build(
    name: Annotated[str, typer.Argument(help="Its id; made if it is not there yet.")],
    base: Annotated[
        str | None,
        typer.Option(help="Root file system directory on the node, or template:ID."),
    ] = None,
    debian_package: Annotated[
        list[str] | None, typer.Option(help="A Debian package; may be repeated.")
    ] = None,
    python_package: Annotated[
        list[str] | None, typer.Option(help="A Python package (PEP 508); may be repeated.")
    ] = None,
    preload: Annotated[
        list[str] | None, typer.Option(help="A module to import beforehand; may be repeated.")
    ] = None,
    pool_size: Annotated[
        int | None, typer.Option(min=0, help="Instances to keep ready at least.")
    ] = None,
    pool_max: Annotated[
        int | None, typer.Option(min=0, help="Instances to keep ready at most.")
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """
    Make a template with packages, a new version of one that is there, and follow its build.

    Without any option, what is there is built again with the packages that there are now.
    """
    options = {
        "base_image": base,
        "debian_packages": debian_package,
        "python_packages": python_package,
        "preload": preload,
        "pool_size": pool_size,
        "pool_max": pool_max,
    }
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    with connect(url, api_key) as atoll:
        try:
            template = atoll.templates.get(name)
        except NotFound:
            if not given:
                raise  # Nothing to build: more likely a slip than a template without packages.
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
    version: Annotated[int | None, typer.Option(min=1, help="Another than the newest.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Print what a template's build has printed."""
    with connect(url, api_key) as atoll:
        text = atoll.templates.log(template_id, version)
    typer.echo(output.visible(text), nl=False)


@app.command()
def rm(
    template_id: Annotated[
        list[str], typer.Argument(metavar="TEMPLATE...", autocompletion=template_ids)
    ],
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Remove templates; sessions that came from them live on."""
    with connect(url, api_key) as atoll:
        for one in template_id:
            atoll.templates.delete(one)
    output.removed(template_id, json=json)
