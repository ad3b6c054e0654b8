"""`atoll serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import DataDir, flat, settings


@dataclass(kw_only=True)
class ServerOptions:
    """Options that are settings, too."""

    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: ATOLL_HOST.")] = (
        None
    )
    port: Annotated[
        int | None, typer.Option(help="Port; 0 chooses a free one. Default: ATOLL_PORT.")
    ] = None
    data_dir: DataDir = None
    workers: Annotated[
        int | None,
        typer.Option(help="Server processes; more than one needs Redis. Default: ATOLL_WORKERS."),
    ] = None
    tls_cert: Annotated[Path | None, typer.Option(help="TLS certificate chain (PEM).")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate (PEM).")] = (
        None
    )


@flat
def serve(
    options: ServerOptions,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow other addresses than loopback without TLS.")
    ] = False,
    stop_sessions: Annotated[
        bool, typer.Option("--stop-sessions", help="End all sessions when the server stops.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Log in JSON.")] = False,
) -> None:
    """
    Run the server.

    Sessions continue when the server stops: the next server with the same data directory takes them
    over. All other settings are environment variables; see the settings reference.
    """
    # Before the application loads, so that a misspelt setting fails at once.
    chosen = settings(**vars(options), insecure=insecure or None, log_json=json or None)
    from atoll.app import server

    server.serve(chosen, stop_sessions=stop_sessions)
