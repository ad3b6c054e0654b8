"""
Runs the tests in parallel, in each variant, and runs what failed again, alone.

    python -m tests.run [--quick | --changed] [arguments of pytest]

`--quick` is `make test`: the tests with the marker `quick`, which need nothing but bubblewrap, or
are the smoke test of a server that is installed. `--changed` is `make test-changed`: those of them
that a change can break (`tests.changes`). Without either it is `make test-all`: everything, and in
each of `VARIANTS` what can differ there. Arguments that name tests replace the selection.

A failure beside others may be a race. Failed cases, at most `MAX_RERUN`, are run again, one at a
time and at most twice. One that passes is listed as flaky with its first failure and does not fail
the run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests import changes, missing, unprivileged
from tests.servers.kubernetes import background, network

TOP = Path(__file__).resolve().parents[1]
MAX_RERUN = 5
RERUNS = 2
NO_TESTS = 5
"""Exit code of pytest when nothing was selected."""


@dataclass(frozen=True)
class Variant:
    """A way to run tests: with another driver, as another user, or in another network."""

    name: str
    paths: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    ordinary_user: bool = False
    own_network: bool = False
    workers: int | None = None
    """How many processes share the tests; what the environment says if None."""


LOCAL = Variant("the local driver")
DOCKER = Variant(
    "the Docker driver",
    ("tests/e2e",),
    ("-m", "every_driver"),
    {"TEST_DRIVER": "docker"},
)
UNPRIVILEGED = Variant(
    "an ordinary user",
    (
        "tests/contract/drivers/test_driver_contract.py",
        "tests/contract/drivers/test_local_driver.py",
        "tests/contract/drivers/test_copy.py",
        "tests/contract/drivers/test_pause.py",
        "tests/component/test_app.py",
        "tests/unit/drivers",
        "tests/component/drivers",
        "tests/unit/executor/test_disk_usage.py",
        "tests/component/executor/test_workspace.py",
    ),
    ordinary_user=True,
)
KUBERNETES = Variant(
    "Kubernetes",
    ("tests/kubernetes",),
    own_network=True,
    # Each process has a cluster of its own.
    workers=2,
)
KUBERNETES_API = Variant(
    "the Kubernetes driver",
    DOCKER.paths,
    DOCKER.options,
    {"TEST_DRIVER": "kubernetes"},
    own_network=True,
    workers=2,
)
VARIANTS = (LOCAL, DOCKER, UNPRIVILEGED, KUBERNETES, KUBERNETES_API)


@dataclass(frozen=True)
class Failure:
    variant: Variant
    test: str
    output: str


@dataclass(frozen=True)
class Ended:
    code: int
    failures: dict[str, Failure]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.run", allow_abbrev=False)
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument("--quick", action="store_true")
    tier.add_argument("--changed", action="store_true")
    given, arguments = parser.parse_known_args()
    named = [word for word in arguments if _path(word).exists() and not word.startswith("-")]

    runs = [(LOCAL, arguments)]
    if named:
        runs = by_variant(arguments, named)
    elif given.changed:
        selected = changes.selection(TOP)
        if not selected:
            print("Nothing changed that a test depends on.")
            return 0
        runs = [(LOCAL, ["--quick", *selected, *arguments])]
    elif given.quick:
        runs = [(LOCAL, ["--quick", *arguments])]
    elif unprivileged.ROOT:
        runs = [(variant, [*variant.paths, *arguments]) for variant in VARIANTS]
    if not (named or given.changed or given.quick) and os.environ.get("CI"):
        os.environ[missing.REQUIRED] = "1"

    failures: list[Failure] = []
    codes = []
    on_cluster = unprivileged.ROOT and any(needs_cluster(variant) for variant, _ in runs)
    with background.building() if on_cluster else nullcontext() as built:
        for variant, selected in runs:
            if needs_cluster(variant) and built is not None:
                built()
            print(f"\n=== Tests with {variant.name}", flush=True)
            ended = pytest(variant, [*parallel(variant), *selected])
            if ended.code not in (0, 1, NO_TESTS):
                return ended.code
            codes.append(ended.code)
            failures += ended.failures.values()
    if not failures:
        return max((code for code in codes if code != NO_TESTS), default=NO_TESTS)
    return rerun(failures)


def by_variant(arguments: list[str], named: list[str]) -> list[tuple[Variant, list[str]]]:
    """Tests that need a Kubernetes cluster run with that, others with the local driver."""
    places = [(TOP / path).resolve() for path in KUBERNETES.paths]
    on_cluster = [
        word for word in named if any(_path(word).is_relative_to(place) for place in places)
    ]
    others = [word for word in named if word not in on_cluster]
    runs = []
    if others:
        runs.append((LOCAL, [word for word in arguments if word not in on_cluster]))
    # A run of a directory above them with the local driver skips them.
    if any(place.is_relative_to(_path(word)) for word in others for place in places):
        on_cluster = list(KUBERNETES.paths)
    if on_cluster:
        rest = [word for word in arguments if word not in named]
        runs.append((KUBERNETES, [*on_cluster, *rest]))
    return runs


def needs_cluster(variant: Variant) -> bool:
    return variant.own_network or os.environ.get("TEST_DRIVER") == "kubernetes"


def _path(word: str) -> Path:
    """Of the file or directory in an argument that may name a test in it."""
    return Path(word.partition("::")[0]).resolve()


def parallel(variant: Variant) -> list[str]:
    workers = str(variant.workers or os.environ.get("WORKERS", "4"))
    return ["--numprocesses", workers, "--dist", "loadfile", "--no-loadscope-reorder"]


def rerun(failures: list[Failure]) -> int:
    """Run failed cases again, one at a time, and report those that pass as flaky."""
    if len(failures) > MAX_RERUN:
        print(f"\n{len(failures)} cases failed: too many to run them again.")
        return 1
    failed = failures
    for number in range(RERUNS):
        print(f"\n=== What failed, again and alone ({number + 1} of {RERUNS})", flush=True)
        failed = [failure for failure in failed if not passes_alone(failure)]
        if not failed:
            break
    flaky = [failure for failure in failures if failure not in failed]
    for failure in flaky:
        print(f"\n=== First failure of {failure.test} with {failure.variant.name}")
        print(failure.output)
    print(f"\n{len(failed)} failed again; {len(flaky)} flaky: failed beside others, passed alone")
    for word, cases in (("FAILED", failed), ("FLAKY", flaky)):
        for case in cases:
            print(f"{word} {case.test} with {case.variant.name}")
    return 1 if failed else 0


def passes_alone(failure: Failure) -> bool:
    return pytest(failure.variant, [failure.test]).code == 0


def pytest(variant: Variant, arguments: list[str]) -> Ended:
    """Run pytest; `failures` has the first failure of each case."""
    with unprivileged.directory() as home:
        log = home / "failures"
        command = [sys.executable, "-m", "pytest", "-p", "tests.failures", *variant.options]
        env = {**os.environ, **variant.env}
        if needs_cluster(variant) and unprivileged.ROOT:
            command = [*network.prefix(), *command]
        if variant.ordinary_user:
            command = [*unprivileged.prefix(), *command, "-p", "no:cacheprovider"]
            command.append(f"--basetemp={home / 'tmp'}")
            env = unprivileged.environment(home)
        code = wait(
            subprocess.Popen(
                [*command, *arguments], cwd=TOP, env={**env, "TEST_FAILURES": str(log)}
            )
        )
        lines = log.read_text().splitlines() if log.exists() else []
    failures: dict[str, Failure] = {}
    for line in map(json.loads, lines):
        # Fixtures that end with a file, such as a server, check all tests of the file: it is run
        # completely.
        test = line["id"].partition("::")[0] if line["when"] == "teardown" else line["id"]
        failures.setdefault(test, Failure(variant, test, line["output"]))
    return Ended(code, failures)


def wait(process: subprocess.Popen[bytes]) -> int:
    """For its end, also after a Ctrl-C: it got that too, and ends the servers of its tests."""
    while True:
        with suppress(KeyboardInterrupt):
            return process.wait()


if __name__ == "__main__":
    sys.exit(main())
