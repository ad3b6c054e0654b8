"""`make fuzz`: runs rounds with consecutive seeds until the time is over."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from atoll.protocol import frames
from tests import drivers
from tests.e2e.hostile.conftest import Target
from tests.e2e.hostile.host import MiB, resident
from tests.fuzz import links, servers
from tests.fuzz.hostile import ANSWERS, Said, hellos, say, scripts

Made = TypeVar("Made")

LINK_EXAMPLES = 500
SERVER_EXAMPLES = 20
MAX_GROWTH = 256 * MiB
"""Of the server's memory, over all rounds."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long in all")
    parser.add_argument("--seed", type=int, help="the first seed; random when not given")
    parser.add_argument("--runtime", default="", help="OCI runtime of a Docker engine: runsc")
    parser.add_argument(
        "--storage", default="auto", help="of a Docker engine: volumes, to reach it by relays"
    )
    asked = parser.parse_args()
    first = random.randrange(1_000_000) if asked.seed is None else asked.seed
    options = {"ATOLL_DOCKER__RUNTIME": asked.runtime, "ATOLL_DOCKER__STORAGE": asked.storage}
    with (
        tempfile.TemporaryDirectory(prefix="atoll-fuzz-") as directory,
        drivers.chosen(Path(directory)),
        servers.hostile_server(Path(directory), **options) as target,
    ):
        failed = _rounds(target, first, time.monotonic() + asked.seconds)
    print(f"{failed} rounds failed" if failed else "every request ended as it should")
    return 1 if failed else 0


def _rounds(target: Target, number: int, deadline: float) -> int:
    """How many rounds failed."""
    before, failed = resident(target.pid), 0
    while True:
        print(f"seed {number}, {(resident(target.pid) - before) // MiB} MiB", flush=True)
        try:
            _round(number, target)
            assert resident(target.pid) - before < MAX_GROWTH, "the server's memory grows"
        except Exception:  # noqa: BLE001 - reported, and the next seed is tried
            failed += 1
            traceback.print_exc()
            print(f"seed {number} failed", file=sys.stderr, flush=True)
        number += 1
        if time.monotonic() > deadline:
            return failed


def _round(number: int, target: Target) -> None:
    requests = st.sampled_from(sorted(ANSWERS)).flatmap(
        lambda op: st.tuples(st.just(op), scripts(op))
    )
    _examples(number, LINK_EXAMPLES, requests, lambda said: asyncio.run(links.play(*said)))
    _examples(number, LINK_EXAMPLES // 10, hellos, _greet)
    _examples(number, SERVER_EXAMPLES, scripts("run"), lambda script: _execute(target, script))


def _greet(greeting: Said) -> None:
    asyncio.run(links.play("stat", [say(frames.END, ANSWERS["stat"])], greeting))


def _execute(target: Target, script: list[Said]) -> None:
    box = target.box(template_id="python3")
    servers.play(box, script)
    assert target.client.delete(box.url).is_success


def _examples(
    number: int, count: int, strategy: st.SearchStrategy[Made], check: Callable[[Made], None]
) -> None:
    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def examples(made: Made) -> None:
        check(made)

    examples()


if __name__ == "__main__":
    sys.exit(main())
