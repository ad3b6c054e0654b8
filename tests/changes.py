"""
Which tests a change can break.

A change is what differs from the main branch (or the commit `SINCE`), committed or not. A test
depends on what it or its `conftest.py` imports, directly or not. No test imports what runs as a
program of its own, the server and the executor: a change to a package of the source also selects
the directories of tests that have its name, and `ALWAYS`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import grimp

ALWAYS = ("tests/e2e/test_sessions.py", "tests/e2e/test_executions.py")


def selection(top: Path) -> list[str]:
    """Paths for pytest, below `top`; None if no test depends on the change."""
    changed = [path for path in _changed(top) if path.suffix == ".py"]
    graph = _imports()
    found: set[Path] = set()
    for path in changed:
        module = _module(path)
        dependents = graph.find_downstream_modules(module) if module in graph.modules else set()
        found |= _tests(top, [path, *(_path(top, name) for name in dependents)])
        if path.parts[:2] == ("src", "atoll") and (top / path).exists():
            found |= {Path(test) for test in ALWAYS}
            found |= {place.relative_to(top) for place in top.glob(f"tests/*/{path.parts[2]}")}
    return sorted(map(str, _without_nested(found)))


def _imports() -> grimp.ImportGraph:
    graph = grimp.build_graph("atoll", "tests", cache_dir=None)
    # The application uses everything. Commands and the embedded mode of the SDK import it when they
    # start it, and so does `preloaded` with commands: their tests are no tests of all of its parts.
    later = [
        (name, "atoll.app.application")
        for name in graph.find_modules_that_directly_import("atoll.app.application")
    ]
    started = graph.find_modules_directly_imported_by("tests.preloaded")
    for importer, imported in {*later, *(("tests.preloaded", name) for name in started)}:
        if not importer.startswith("tests.") or importer == "tests.preloaded":
            graph.remove_import(importer=importer, imported=imported)
    return graph


def _tests(top: Path, paths: Iterable[Path]) -> set[Path]:
    """The tests among `paths`, and directories in place of their `conftest.py`."""
    there = [path for path in paths if path.parts[0] == "tests" and (top / path).exists()]
    return {path for path in there if path.name.startswith("test_")} | {
        path.parent for path in there if path.name == "conftest.py"
    }


def _without_nested(paths: set[Path]) -> set[Path]:
    return {path for path in paths if paths.isdisjoint(path.parents)}


def _changed(top: Path) -> list[Path]:
    def git(*arguments: str) -> list[str]:
        done = subprocess.run(
            ["git", *arguments], cwd=top, check=True, capture_output=True, text=True
        )
        return done.stdout.splitlines()

    since = os.environ.get("SINCE") or next(
        iter(git("for-each-ref", "--format=%(refname)", "refs/remotes/origin/main")), "HEAD"
    )
    base = git("merge-base", since, "HEAD")[0]
    names = git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")
    return [Path(name) for name in names]


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts[1 if path.parts[0] == "src" else 0 :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _path(top: Path, module: str) -> Path:
    path = Path(*(["src"] if module.startswith("atoll") else []), *module.split("."))
    return path / "__init__.py" if (top / path).is_dir() else path.with_suffix(".py")
