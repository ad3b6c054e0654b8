"""
Sessions with packages of their own: how long they take to begin.

Beside a session without, and beside pip and uv that install the same wheels from the same index
into a directory, uv with a cache and without. Those begin no session and isolate nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers.index import Index

from bench.__main__ import create, delete, run, wait_for_pool
from bench.report import Way
from bench.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.client import Client
    from bench.report import Report

WHEELS, MODULES, LINES = 10, 100, 200
POOL = 3


class Sessions:
    """Sessions one after another, each deleted before the next one is timed."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._last = ""

    def ready(self) -> None:
        if self._last:
            delete(self._client, self._last)
        wait_for_pool(self._client, "python", POOL)

    def begin(self, needs: list[str]) -> None:
        split = [each.partition("==") for each in needs]
        wanted = [{"name": name, "version": sign + version} for name, sign, version in split]
        self._last = create(self._client, **({"dependencies": wanted} if needs else {}))

    def check(self, code: str) -> None:
        """What is fast has to be right as well."""
        run(self._client, self._last, code)


def measure(report: Report, place: Path, *, rounds: int, heavy: list[str]) -> None:
    with Index() as index:
        # One version a round for what is not in the cache yet, and one that is.
        for version in range(rounds + 1):
            for number in range(WHEELS):
                index.add(f"bench-{number}", f"1.{version}", files=_modules(number, version))

        def needs(version: int) -> list[str]:
            return [f"bench-{number}==1.{version}" for number in range(WHEELS)]

        report.section(f"a session with {WHEELS} packages of {MODULES} modules each")
        with Server(ATOLL_POOL__SIZE=str(POOL), ATOLL_PACKAGES__INDEX_URL=index.url) as server:
            sessions = Sessions(server.client())
            versions = iter(range(1, rounds + 1))
            new = Way(
                "create, packages not in the cache",
                lambda: sessions.begin(needs(next(versions))),
                sessions.ready,
                ours=True,
            )
            _measure(report, place, sessions, needs(0), rounds, ["--index-url", index.url], new)
            sessions.check("import bench_0, bench_9_lib.module_7")
    if heavy:
        report.section(f"a session with {', '.join(heavy)}, from the index of this machine's pip")
        with Server(ATOLL_POOL__SIZE=str(POOL)) as server:
            _measure(report, place, Sessions(server.client()), heavy, rounds, [], None)


def _measure(
    report: Report,
    place: Path,
    sessions: Sessions,
    needs: list[str],
    rounds: int,
    index: list[str],
    new: Way | None,
) -> None:
    """With `index` as options for pip and uv."""
    target = place / "target"
    gone = partial(shutil.rmtree, target, ignore_errors=True)
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    ways = [Way("create without packages", partial(sessions.begin, []), sessions.ready)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-cache-dir", "--target", str(target), *index, *needs]
    if subprocess.run([*pip[:3], "--version"], capture_output=True).returncode:
        report.skip("pip install --target", "this environment has no pip")
    else:
        ways.append(Way("pip install --target", _command(pip), gone))
    if uv is None:
        report.skip("uv pip install --target", "uv is not installed")
    else:
        install = [uv, "pip", "install", "--quiet", "--python", sys.executable]
        install += ["--target", str(target), *index, *needs]
        cached = [*install, "--cache-dir", str(place / "uv")]
        _command(cached)()
        ways.append(Way("uv pip install --target", _command([*install, "--no-cache"]), gone))
        ways.append(Way("uv pip install --target, cached", _command(cached), gone))
    if new is not None:
        ways.append(new)
    sessions.ready()
    sessions.begin(needs)
    known = partial(sessions.begin, needs)
    ways.append(Way("create, packages in the cache", known, sessions.ready, ours=True))
    report.turns(ways, rounds)


def _command(command: list[str]) -> Callable[[], object]:
    return partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)


def _modules(number: int, version: int) -> dict[str, str]:
    text = "".join(f"value_{line} = {line} + {version}\n" for line in range(LINES))
    files = {f"bench_{number}_lib/module_{each}.py": text for each in range(MODULES)}
    return {f"bench_{number}_lib/__init__.py": "", **files}
