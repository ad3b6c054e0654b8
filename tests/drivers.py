"""
The driver that the servers of the tests run with, and what the host sees of its instances.

`TEST_DRIVER=docker` chooses a Docker engine: the one at `TEST_DOCKER_URL`, which has the image of
`tests.servers.images`, or else one that the tests start. `TEST_DRIVER=kubernetes` chooses a cluster
of the tests (`tests.chosen_cluster`). Where something of the local driver alone is tested,
`LOCAL_ONLY` says why; `NOT_ON_KUBERNETES` adds what differs in a cluster.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import chosen_cluster
from tests.chosen_cluster import ChosenCluster, handle_of
from tests.servers import docker
from tests.servers.images import PYTHON, make_archives

CHOSEN = os.environ.get("TEST_DRIVER", "local")
NODE = "kubernetes" if CHOSEN == "kubernetes" else "local"
"""The name of a server's own node in the API."""
cluster: ChosenCluster | None = None
"""The cluster that was chosen, while it runs."""
URL = os.environ.get("TEST_DOCKER_URL")

SPARE = 2
"""Processes below PID 1 beyond the limit: the zygote, and a spare child that is about to end."""

VARIABLES = frozenset({"HOSTNAME"} if CHOSEN != "local" else ())
"""Additional environment variables of user code: that is `sandbox`."""

pausing = pytest.mark.skipif(
    os.geteuid() != 0 or CHOSEN == "kubernetes",
    reason="neither instances of an ordinary user nor pods can be paused",
)
PAUSE = pytest.param("pause", marks=pausing)

_NAMED = "`image` is an image of the engine there, and `python` a path inside it"
_AWAY = "bubblewrap is taken away; test_docker.py takes the engine away"
_STARTED = "what started a container is the engine's, which ends the container with it"
LOCAL_ONLY = {
    "e2e/hostile/test_hostile_images.py": "it runs on every driver, whichever was chosen",
    "e2e/hostile/test_package_images.py": f"{_NAMED}; test_docker_packages.py has such images",
    "e2e/hostile/test_host_files.py::test_a_template_cannot_refer_to_a_path_of_the_host": _NAMED,
    "e2e/hostile/test_host_files.py::test_a_template_cannot_escape_through_a_link": _NAMED,
    "e2e/test_recovery.py::test_an_instance_survives_the_process_that_started_it": _STARTED,
    "e2e/hostile/test_inside.py::test_a_flood_stays_in_its_own_execution[root-many processes]": (
        "user code and executor have one memory: a bomb that fills it again and again holds up its "
        "own executor until that is given up"
    ),
    "e2e/test_executions.py::test_javascript_runs": "the image has no Node.js",
    "e2e/test_reports.py": "a container has no network to report by",
    **{
        f"e2e/test_contexts.py::test_{name}": "the image has no packages beside Python"
        for name in (
            "figures_are_shown_once_at_the_end_or_by_show",
            "drawing_prints_nothing_and_leaves_only_the_figure",
            "a_pandas_table_is_returned_as_html_and_text",
            "magics_and_shell_commands_work_with_ipython",
        )
    },
    **{
        f"e2e/test_health_at_need.py::test_{name}": _AWAY
        for name in (
            "without_a_driver_responses_contain_retry_after",
            "without_a_driver_running_instances_keep_working",
            "a_session_that_cannot_start_is_in_error_and_recovers_automatically",
            "a_killed_instance_is_replaced_after_a_failed_request",
            "a_session_in_error_can_be_deleted",
            "an_execution_does_not_wait_for_an_unavailable_driver",
            "many_sessions_get_timely_responses_while_the_driver_is_unavailable",
        )
    },
}
"""Why a test does not apply to another driver, by path, test or case below `tests`."""


_LOST = "the files of a pod end with it"
_FULL = "the executor ends code that fills its disk, and no write fails"
_SHARED = "a pod has the read-only /sys of its machine"
_OPEN = "the network of the cluster enforces no policies"
_ELSEWHERE = "instances have no files in a directory of the server"
_NO_JOURNAL = "results wait in the memory of an executor whose files end with it"
_NO_PACKAGES = "packages of pods are those of the image"
NOT_ON_KUBERNETES = {
    "e2e/hostile/test_home.py": _NO_PACKAGES,
    "e2e/hostile/test_host_files.py::test_key_database_and_log_of_the_server_are_unreachable": (
        _ELSEWHERE
    ),
    "e2e/hostile/test_host_files.py::test_paths_in_the_mount_table_cannot_be_opened": _SHARED,
    **{
        f"e2e/hostile/test_host_files.py::test_paths_of_the_host_do_not_exist[root-{path}]": _SHARED
        for path in ("/sys", "/sys/fs/cgroup", "/sys/kernel", "/proc/kallsyms")
    },
    "e2e/hostile/test_journal.py": _NO_JOURNAL,
    **{
        f"e2e/hostile/test_exhaustion.py::test_{name}": _FULL
        for name in (
            "filling_the_disk_affects_only_the_session",
            "unnamed_files_fill_only_the_disk_of_the_session",
        )
    },
    **{
        f"e2e/hostile/test_network.py::test_{name}": _OPEN
        for name in (
            "nothing_on_the_host_can_be_connected_to",
            "no_datagram_leaves",
            "loopback_is_the_only_interface_and_no_route_exists",
        )
    },
    "e2e/hostile/test_standstill.py": "a cluster cannot freeze pods",
    "e2e/test_checkpoints.py::test_files_lost_with_their_node_are_restored_from_the_checkpoint": (
        _ELSEWHERE
    ),
    "e2e/test_health_at_need.py": _LOST,
    "e2e/test_lifecycle.py::test_an_archived_session_uses_no_disk_on_the_node": _ELSEWHERE,
    **{
        f"e2e/test_lifecycle.py::test_{name}": "a cluster cannot freeze pods"
        for name in (
            "a_paused_session_keeps_its_memory_and_resumes_on_a_request",
            "a_session_with_a_running_execution_is_not_paused",
        )
    },
    "e2e/test_recovery.py::test_a_server_with_stop_sessions_leaves_nothing": (
        "a kubelet ends the processes of a pod after Atoll has deleted it"
    ),
    "e2e/test_volumes.py": "the bucket is not mounted",
}
"""Further tests that do not apply to a cluster, named in the same way."""


def why_not(path: str, name: str) -> str | None:
    """Why a test does not run with the selected driver; None if it does."""
    if CHOSEN == "local":
        return None
    reasons = LOCAL_ONLY | (NOT_ON_KUBERNETES if CHOSEN == "kubernetes" else {})
    names = (f"{path}::{name}", f"{path}::{name.partition('[')[0]}", path)
    return next((reasons[one] for one in names if one in reasons), None)


def settings(url: str) -> dict[str, str]:
    """For a server that is to use the engine at `url`."""
    return {"ATOLL_DRIVER": "docker", "ATOLL_DOCKER__URL": url, "ATOLL_DOCKER__IMAGE": PYTHON}


def settings_of(data_dir: Path) -> dict[str, str]:
    """What a server with this data directory needs apart from others."""
    return {} if cluster is None else cluster.settings_of(data_dir)


@contextmanager
def chosen(place: Path) -> Iterator[None]:
    """The driver that was chosen, for all servers that a program other than pytest starts."""
    global cluster
    if CHOSEN == "local":
        yield
    elif CHOSEN == "kubernetes":
        with chosen_cluster.running(place) as cluster, _environment(cluster.settings()):
            yield
    elif URL is not None:
        with _environment(settings(URL)):
            yield
    else:
        with docker.Dockerd(place) as engine:
            make_archives(place).load(engine)
            with _environment(settings(engine.url)):
                yield


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


def handle(data_dir: Path, instance_id: str) -> dict[str, Any]:
    """
    Details of an instance: `child`, its first process; `pid`, the process that started that; their
    start times; its `workspace`. `FileNotFoundError` if it does not exist.
    """
    if cluster is not None:
        return cluster.handle(data_dir, instance_id)
    written = _directory(data_dir, instance_id) / "handle.json"
    if os.environ.get("ATOLL_DRIVER") != "docker":
        data: dict[str, Any] = json.loads(written.read_text())["data"]
        return data
    socket = Path(os.environ["ATOLL_DOCKER__URL"].removeprefix("unix://"))
    try:
        found = docker.ask(socket, "GET", f"/containers/atoll-{instance_id}/json").json()
    except httpx.HTTPStatusError as error:
        raise FileNotFoundError(instance_id) from error
    child = int(found["State"]["Pid"])
    if child == 0:
        raise FileNotFoundError(f"{instance_id} does not run")
    return handle_of(child, found["Config"]["Labels"]["atoll.workspace"])


def instances(data_dir: Path) -> set[str]:
    """Ids of the instances that exist on the node of this data directory."""
    if cluster is not None:
        return cluster.instances(data_dir)
    directory = data_dir / "node" / "instances"
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def workspaces(data_dir: Path) -> set[str]:
    """Names of the workspaces that exist on the node apart from instances."""
    if cluster is not None:
        return set()
    return {path.name for path in (data_dir / "node" / "workspaces").iterdir()}


def link(data_dir: Path, instance_id: str) -> tuple[Path, str | None]:
    """The directory of an executor's socket, and the token that it asks for."""
    directory = _directory(data_dir, instance_id)
    if os.environ.get("ATOLL_DRIVER") != "docker":
        return directory, None
    key = bytes.fromhex((data_dir / "node" / "docker-key").read_text())
    return directory / "link", hmac.new(key, instance_id.encode(), hashlib.sha256).hexdigest()


def journal(data_dir: Path, instance_id: str) -> Path:
    """The file that the executor of an instance begins with."""
    workspace = str(handle(data_dir, instance_id)["workspace"])
    if os.environ.get("ATOLL_DRIVER") == "docker":
        return data_dir / "node" / "mounts" / f"executor-{workspace}" / "files" / "journal" / "0"
    return data_dir / "node" / "workspaces" / workspace / "journal.0"


def _directory(data_dir: Path, instance_id: str) -> Path:
    return data_dir / "node" / "instances" / instance_id
