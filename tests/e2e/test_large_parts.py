"""Code and output too large for a row: short in lists, whole by id, also after a restart."""

from __future__ import annotations

import shutil
import signal
from typing import TYPE_CHECKING, Any

from tests.e2e.api import V1, Api, answer
from tests.harness import Server

if TYPE_CHECKING:
    from pathlib import Path

CODE = "def handler(event):\n    print('o' * 99_999)\n    return 'r' * 50_000\n#" + "c" * 40_000
FIELDS = ["code", "stdout", "return_value"]


def read(api: Api, path: str) -> dict[str, Any]:
    return answer(api.http.get(f"{V1}/{path}"))


def test_a_list_has_the_beginning_and_the_record_has_all(api: Api, session: str) -> None:
    result = api.run(session, CODE)
    listed = read(api, f"sessions/{session}/executions")["items"][0]
    whole = read(api, f"executions/{result['execution_id']}")

    assert result["shortened"] == whole["shortened"] == []
    assert result == read(api, f"executions/{result['execution_id']}/result")
    assert (whole["code"], whole["return_value"]) == (CODE, "r" * 50_000)
    assert whole["stdout"] == result["stdout"] == "o" * 99_999 + "\n"
    assert whole["stdout_truncated"] is False
    assert listed["shortened"] == FIELDS
    assert (listed["code"], listed["return_value"]) == (CODE[:4096], None)
    assert listed["stdout"] == "o" * 4096
    assert (listed["stdout_truncated"], listed["stdout_bytes"]) == (True, 100_000)


def test_large_parts_outlive_a_kill_and_lost_parts_are_marked(
    bubblewrap: str, tmp_path: Path
) -> None:
    with Server(tmp_path) as server, server.client() as http:
        api = Api(http)
        result = api.run(api.create()["id"], CODE)
        server.stop(signal.SIGKILL)
        server.start()
        with server.client() as again:
            path = f"executions/{result['execution_id']}"
            assert read(Api(again), f"{path}/result") == result

            shutil.rmtree(tmp_path / "blobs")
            left = read(Api(again), path)

            assert left["shortened"] == FIELDS
            assert left["stdout"] == "o" * 4096
            assert read(Api(again), f"{path}/result")["shortened"] == FIELDS[1:]
