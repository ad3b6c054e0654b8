"""What all tests share."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests import drivers
from tests.harness import Server
from tests.missing import missing
from tests.servers.docker import Dockerd
from tests.servers.images import Archives, make_archives
from tests.servers.mariadb import MariaDB
from tests.servers.postgres import PostgreSQL
from tests.servers.registry import Registry
from tests.servers.s3 import S3Server

LONGEST = 300
"""Seconds. Far more than any test takes: a test that hangs fails instead."""

# A process may stall. The examples are the same in each run, on every machine.
settings.register_profile(
    "atoll",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("atoll")


QUICK_DIRECTORIES = ("unit", "component")
"""Where all tests are quick; elsewhere those with the marker are."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run what `make test` runs")


def pytest_configure() -> None:
    # A shell starts background programs with SIGINT ignored, which their children inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        left_out = [item for item in items if not _is_quick(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _is_quick(item)]
    for item in items:
        path = item.path.relative_to(Path(__file__).parent)
        if (reason := drivers.why_not(str(path), item.name)) is not None:
            item.add_marker(pytest.mark.skip(reason=f"on {drivers.CHOSEN}: {reason}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason to skip, however many tests have it."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, cases in reasons.most_common():
        terminalreporter.write_line(f"SKIPPED {cases}: {reason}")
    if terminalreporter.config.getoption("--quick"):
        terminalreporter.write_line("Left to `make test-all`: what is not marked as quick")


def _is_quick(item: pytest.Item) -> bool:
    if item.get_closest_marker("slow") is not None:
        return False
    directory = item.path.relative_to(Path(__file__).parent).parts[0]
    return directory in QUICK_DIRECTORIES or item.get_closest_marker("quick") is not None


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def not_for_ever() -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"The test takes longer than {LONGEST} s.")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session", autouse=True)
def no_settings_of_the_machine() -> Iterator[None]:
    """The tests' own settings only."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("ATOLL_")}
    yield
    os.environ.update(kept)


@pytest.fixture(scope="session", autouse=True)
def own_state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers note their data directories there (`atoll gc`), not in that of the developer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_stays_mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of containers that an engine has taken with it, the workspaces are mounted still."""
    yield
    from atoll.drivers.shared.mount_points import unmount_all

    unmount_all(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session", autouse=True)
def chosen_driver(
    no_settings_of_the_machine: None,
    nothing_stays_mounted: None,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """The selected driver, for all servers that tests start."""
    if drivers.CHOSEN in ("local", "kubernetes"):
        with drivers.chosen(tmp_path_factory.mktemp("driver")):
            yield
        return
    url = drivers.URL or request.getfixturevalue("dockerd").url
    with pytest.MonkeyPatch.context() as patch:
        for name, value in drivers.settings(url).items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address without a listener: its port stays bound, so that no other process uses it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture(scope="session")
def bubblewrap() -> str:
    path = shutil.which("bwrap")
    if path is not None:
        return path
    missing("bubblewrap is not installed")


@pytest.fixture(scope="session")
def server(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One real `atoll serve` for the tests that need nothing special of it."""
    with Server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def mariadb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MariaDB]:
    """For tests that do not stop it, each in its own database (`new_database`)."""
    with MariaDB(tmp_path_factory.mktemp("mariadb")) as running:
        yield running


@pytest.fixture(scope="session")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgreSQL]:
    """The same."""
    with PostgreSQL(tmp_path_factory.mktemp("postgresql")) as running:
        yield running


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """For tests that do not stop it, each with its own prefix."""
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def own_s3(tmp_path: Path) -> Iterator[S3Server]:
    """One for a test to kill."""
    with S3Server(tmp_path) as running:
        yield running


@pytest.fixture(scope="session")
def image_archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    """Shared by the processes that share the tests."""
    base = tmp_path_factory.getbasetemp()
    return make_archives(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)


@pytest.fixture(scope="session")
def dockerd(
    image_archives: Archives, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Dockerd]:
    """With the images of `tests.servers.images`; for tests that leave it running."""
    with Dockerd(tmp_path_factory.mktemp("dockerd"), tls=True) as running:
        yield image_archives.load(running)


@pytest.fixture
def own_dockerd(image_archives: Archives, tmp_path: Path) -> Iterator[Dockerd]:
    """One for a test to kill."""
    with Dockerd(tmp_path) as running:
        yield image_archives.load(running)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """Empty, of the test's own."""
    with Registry(tmp_path) as running:
        yield running


@pytest.fixture(scope="session")
def runsc() -> str:
    """The name of gVisor's runtime. Not every distribution has it: CI may go without."""
    if shutil.which("runsc") is None:
        pytest.skip("runsc (gVisor) is not installed")
    return "runsc"


@pytest.fixture
def every_level() -> Iterator[None]:
    """
    Logs of every level, whatever an earlier test configured: filtered events are not captured.
    """
    before = structlog.get_config()
    structlog.reset_defaults()
    yield
    structlog.configure(**before)
