"""One console, whichever replica it is opened at."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.console import begin, console
from tests.integration.replicas import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

SHELL = {"rows": 24, "cols": 80}


@pytest.fixture(scope="module")
def shared(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("consoles"), size=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    return shared.start()


def test_one_client_types_across_replicas_and_the_next_takes_over(cluster: Cluster) -> None:
    a, b = cluster.apis
    session = a.create()["id"]
    execution = begin(a, session, terminal=SHELL)
    with console(b, execution) as there:
        there.ready().send("echo fi''rst\n").until("first\r\n")
        with console(a, execution) as here:
            here.until("first\r\n").send("x").refused("console_taken")
            there.send_message(type="close").closed()
            here.ready().send("echo se''cond; exit 5\n").until("second\r\n")
            assert here.ended()["exit_code"] == 5
    assert b.result(execution)["exit_code"] == 5
    b.end(session)


@pytest.mark.parametrize("seen_to_by", ["the other", "the one that dies"])
def test_a_console_of_a_dead_replica_continues_at_another(
    cluster: Cluster, seen_to_by: str
) -> None:
    a, b = cluster.apis
    session = a.create()["id"]
    execution = begin(a if seen_to_by == "the other" else b, session, terminal=SHELL)
    query = {"format": "json"}
    with console(b, execution, query=query) as there, console(a, execution) as waiting:
        there.ready().send("X=kept; echo fi''rst\n").until("first\r\n")
        waiting.until("first\r\n")
        cluster[1].stop(signal.SIGKILL)
        # The right to type goes with the replica.
        waiting.ready().send("echo $X\n").until("kept\r\n")
        with console(a, execution, query={**query, "after": there.position}) as again:
            again.until("kept\r\n")
            assert b"first" not in again.output
            waiting.send("exit\n").ended()
            again.ended()
    a.end(session)
