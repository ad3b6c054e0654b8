"""The tree of commands, and the error handling that they share."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from atoll.cli import exit_codes, output
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


@dataclass(frozen=True)
class _Command:
    """A command, or a group of them, and the module of this package that it is imported from."""

    module: str
    name: str = "app"
    options: dict[str, Any] = field(default_factory=dict)

    def add_to(self, app: typer.Typer, name: str) -> None:
        found = getattr(import_module(f"atoll.cli.{self.module}"), self.name)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, **self.options)
        else:
            app.command(name, **self.options)(found)


_COMMANDS = {
    "serve": _Command("serve", "serve"),
    "run": _Command("run", "run", {"context_settings": {"allow_interspersed_args": False}}),
    "session": _Command("sessions"),
    "execution": _Command("executions"),
    "invocation": _Command("invocations"),
    "context": _Command("contexts"),
    "template": _Command("templates"),
    "volume": _Command("volumes"),
    "node": _Command("nodes"),
    "nodes": _Command("nodes", options={"hidden": True}),
    "events": _Command("events", "events"),
    "webhook": _Command("webhooks"),
    "pools": _Command("nodes", "pools"),
    "key": _Command("keys"),
    "db": _Command("db"),
    "gc": _Command("gc", "gc"),
    "doctor": _Command("doctor", "doctor"),
    "version": _Command("version", "version"),
}


def tree(words: Sequence[str] = ()) -> typer.Typer:
    """The commands, or only the one that the words begin with: the others are not imported."""
    app = typer.Typer(
        cls=Commands,
        help="Runs the code that AI agents write: isolated, at once, on machines you own.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    # A Typer with one command would have no name for it.
    app.callback()(_nothing)
    wanted = words[:1] if words and words[0] in _COMMANDS else _COMMANDS
    for name in wanted:
        _COMMANDS[name].add_to(app, name)
    return app


def _nothing() -> None:
    pass
