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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests import changes, missing, unprivileged

TOP = Path(__file__).resolve().parents[1]
MAX_RERUN = 5
RERUNS = 2
NO_TESTS = 5
"""Exit code of pytest when nothing was selected."""


@dataclass(frozen=True)
class Variant:
    """A way to run tests: with another driver, or as another user."""

    name: str
    paths: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    ordinary_user: bool = False


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
VARIANTS = (LOCAL, DOCKER, UNPRIVILEGED)


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
    parallel = ["--numprocesses", os.environ.get("WORKERS", "4"), "--dist", "loadfile"]
    parallel.append("--no-loadscope-reorder")
    named = any(
        Path(word.partition("::")[0]).exists() for word in arguments if not word.startswith("-")
    )

    variants: tuple[Variant, ...] = (LOCAL,)
    if named:
        pass
    elif given.changed:
        selected = changes.selection(TOP)
        if not selected:
            print("Nothing changed that a test depends on.")
            return 0
        arguments = ["--quick", *selected, *arguments]
    elif given.quick:
        arguments = ["--quick", *arguments]
    else:
        variants = VARIANTS if unprivileged.ROOT else (LOCAL,)
        if os.environ.get("CI"):
            os.environ[missing.REQUIRED] = "1"

    failures: list[Failure] = []
    codes = []
    for variant in variants:
        print(f"\n=== Tests with {variant.name}", flush=True)
        ended = pytest(variant, [*parallel, *variant.paths, *arguments])
        if ended.code not in (0, 1, NO_TESTS):
            return ended.code
        codes.append(ended.code)
        failures += ended.failures.values()
    if not failures:
        return max((code for code in codes if code != NO_TESTS), default=NO_TESTS)
    return rerun(failures)


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
