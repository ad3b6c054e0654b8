"""`atoll serve`."""

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import DataDir, settings


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; ATOLL_HOST.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one; ATOLL_PORT.")] = None,
    data_dir: DataDir = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that serve, with Redis; ATOLL_WORKERS.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond loopback without TLS.")
    ] = False,
    stop_sessions: Annotated[
        bool, typer.Option("--stop-sessions", help="End all sessions when the server ends.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Log JSON lines.")] = False,
) -> None:
    """
    Run the server.

    Sessions outlive it: the next one that is started with the same data takes them over. Every
    other setting is an environment variable; see the reference.
    """
    # Before the application is loaded, which takes longer than finding a misspelt setting.
    chosen = settings(
        host=host,
        port=port,
        data_dir=data_dir,
        workers=workers,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure or None,
        log_json=json or None,
    )
    from atoll.app import server

    server.serve(chosen, stop_sessions=stop_sessions)
