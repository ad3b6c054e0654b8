"""`atoll template …`."""

from typing import Annotated

import typer

from atoll.cli import output
from atoll.cli.complete import template_ids
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

app = typer.Typer(help="What sessions start from.", no_args_is_help=True, rich_markup_mode=None)

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
        str | None, typer.Option(help="Root file system directory on the node.")
    ] = None,
    base_image: Annotated[str | None, typer.Option(help="What the image was made from.")] = None,
    package: Annotated[
        list[str] | None, typer.Option(help="A Python package that it has; may be repeated.")
    ] = None,
    python: Annotated[str | None, typer.Option(help="Interpreter.")] = None,
    preload: Annotated[
        list[str] | None, typer.Option(help="A module to import beforehand; may be repeated.")
    ] = None,
    pool_size: Annotated[int | None, typer.Option(min=0, help="Instances to keep ready.")] = None,
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
    with connect(url, api_key) as atoll:
        template = atoll.templates.create(
            name,
            template_id=template_id,
            image=image,
            base_image=base_image,
            packages=package,
            python=python,
            preload=preload,
            env=variables or None,
            pool_size=pool_size,
            cpu=cpu,
            memory=memory,
            disk=disk,
            max_processes=max_processes,
            require=require,
        )
    output.as_json(template) if json else output.line(template.id)


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
    if json:
        output.as_json({"removed": template_id})
        return
    for one in template_id:
        output.line(one)
