"""The tree of commands, and the error handling that they share."""

import os
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from atoll.cli import (
    contexts,
    db,
    doctor,
    events,
    executions,
    exit_codes,
    gc,
    invocations,
    keys,
    nodes,
    output,
    run,
    serve,
    sessions,
    templates,
    version,
    volumes,
    webhooks,
)
from atoll.errors import AtollError

# Typer exports only its subclasses.
UsageError: Any = typer.BadParameter.__base__
_JSON = "atoll.json"


class Commands(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # A usage error may be raised before the option is parsed.
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_JSON] = "--json" in args[:end]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        output.errors_as_json(False)
        try:
            value = super().invoke(ctx)
            # Not at exit, where a broken pipe can no longer be caught.
            sys.stdout.flush()
            return value
        except AtollError as error:
            output.error(error.message, error.code, error.details)
            raise typer.Exit(exit_codes.FAILED) from None
        except UsageError as error:
            if not ctx.meta[_JSON]:
                raise
            output.errors_as_json(True)
            used = ctx if error.ctx is None else error.ctx
            output.error(error.format_message(), "usage", {"command": used.command_path})
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(exit_codes.INTERRUPTED) from None
        except BrokenPipeError:
            _exit_silently()
        except OSError as error:
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            output.error(what, "local_file")
            raise typer.Exit(exit_codes.FAILED) from None


def _exit_silently() -> NoReturn:
    """The reader of stdout is gone: exit as other programs do after SIGPIPE."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    raise typer.Exit(exit_codes.BROKEN_PIPE)


app = typer.Typer(
    cls=Commands,
    help="Runs the code that AI agents write: isolated, at once, on machines you own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("serve")(serve.serve)
app.command("run", context_settings={"allow_interspersed_args": False})(run.run)
app.add_typer(sessions.app, name="session")
app.add_typer(executions.app, name="execution")
app.add_typer(invocations.app, name="invocation")
app.add_typer(contexts.app, name="context")
app.add_typer(templates.app, name="template")
app.add_typer(volumes.app, name="volume")
app.add_typer(nodes.app, name="node")
app.add_typer(nodes.app, name="nodes", hidden=True)
app.command("events")(events.events)
app.add_typer(webhooks.app, name="webhook")
app.command("pools")(nodes.pools)
app.add_typer(keys.app, name="key")
app.add_typer(db.app, name="db")
app.command("gc")(gc.gc)
app.command("doctor")(doctor.doctor)
app.command("version")(version.version)
