"""
What an execution costs when its files are saved: after the result, or before it.

Beside the plain one, of a session on local blobs whose files are saved when it ends. Each kind of
session takes its turn for one execution at a time.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from tests.servers.s3 import S3Server

from bench.__main__ import create, delete, run
from bench.report import Way
from bench.saves import FILES
from bench.server import Server

if TYPE_CHECKING:
    from pathlib import Path

    from bench.report import Report

CODES = (
    ("print(1)", "print(1)"),
    ("writing a file of 1 KiB", "import os; open('written', 'wb').write(os.urandom(1024))"),
)
KINDS = ("background", "execution")
MANY = 1000
WARM = 5


def measure(report: Report, place: Path, *, executions: int) -> None:
    with ExitStack() as stack:
        s3 = stack.enter_context(S3Server(place))
        servers = {
            "local blobs": stack.enter_context(Server(ATOLL_POOL__SIZE="4")),
            "S3": stack.enter_context(Server(ATOLL_POOL__SIZE="4", **s3.environment())),
        }
        clients = {name: server.client() for name, server in servers.items()}
        for what, files in (("an empty workspace", 0), (f"a workspace of {MANY} files", MANY)):
            sessions = {
                (name, kind): create(client, durability=kind)
                for name, client in clients.items()
                for kind in KINDS
            }
            if files:
                for (name, _), session in sessions.items():
                    run(clients[name], session, FILES.format(count=files, place="tree"))
            for title, code in CODES:
                report.section(f"execute {title}, in {what}")
                ways = [
                    Way(
                        f"durability={kind}, {name}",
                        partial(run, clients[name], session, code),
                        ours=(name, kind) != ("local blobs", "background"),
                    )
                    for (name, kind), session in sessions.items()
                ]
                for way in ways * WARM:
                    way.work()
                report.turns(ways, executions, sync=False)
            for (name, _), session in sessions.items():
                delete(clients[name], session)
