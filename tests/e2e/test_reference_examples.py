"""The request and response examples of the reference, as printed there."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.api import V1, answer

if TYPE_CHECKING:
    from tests.e2e.api import Api

pytestmark = pytest.mark.quick

EXAMPLE: dict[str, Any] = {
    "code": "def handler(event):\n"
    "    return {'message': 'Hello', 'input': event.get('name', 'World')}",
    "language": "python",
    "timeout": 30,
    "event": {"name": "Alice"},
}


def is_timestamp(value: Any) -> bool:
    return value.endswith("Z") and datetime.fromisoformat(value).utcoffset() is not None


def test_submit_responds_as_documented(api: Api, session: str) -> None:
    submitted = answer(api.http.post(f"{V1}/sessions/{session}/execute", json=EXAMPLE), 202)

    assert set(submitted) == {"execution_id", "invocation_id", "status", "submitted_at"}
    assert submitted["status"] == "submitted"
    assert re.fullmatch(r"exec_\d{8}_[0-9a-z]{16,}", submitted["execution_id"])
    assert is_timestamp(submitted["submitted_at"])


def test_status_and_result_of_the_handler_match_the_reference(api: Api, session: str) -> None:
    execution_id = api.submit(session, **EXAMPLE)
    result = api.result(execution_id)
    status = answer(api.http.get(f"{V1}/executions/{execution_id}/status"))

    assert status["execution_id"] == execution_id
    assert status["session_id"] == session
    assert status["status"] == "completed"
    assert is_timestamp(status["created_at"])
    assert is_timestamp(status["completed_at"])
    assert status["created_at"] <= status["completed_at"]

    assert result["execution_id"] == execution_id
    assert result["status"] == "success"
    assert result["stdout"] == ""
    assert result["stderr"] == ""
    assert result["exit_code"] == 0
    assert result["return_value"] == {"message": "Hello", "input": "Alice"}
    assert result["artifacts"] == []


def test_the_result_has_output_metrics_and_artifact_paths_as_documented(
    api: Api, session: str
) -> None:
    code = (
        "def handler(event):\n"
        "    open('output.txt', 'w').write('done')\n"
        "    print('Processing complete.')\n"
        "    return {'message': 'Hello', 'input': event['name']}\n"
    )
    result = api.run(session, code, event={"name": "Alice"}, language="python", timeout=30)

    assert result["stdout"] == "Processing complete.\n"
    assert result["artifacts"] == ["output.txt"]
    metrics = result["metrics"]
    assert {"duration_ms", "cpu_time_ms", "peak_memory_mb"} <= set(metrics)
    assert 0 < result["execution_time"] < 30
    assert abs(metrics["duration_ms"] - result["execution_time"] * 1000) < 0.01


def test_a_session_has_the_fields_of_the_reference(api: Api, session: str) -> None:
    shown = api.get(session)

    assert {
        "id", "template_id", "status", "runtime_type", "runtime_node", "container_id", "pod_name",
        "resources", "env_vars", "created_at", "updated_at", "timeout",
    } <= set(shown)  # fmt: skip
    assert re.fullmatch(r"sess_[0-9a-z]{16,}", shown["id"])
    assert shown["status"] == "running"
    assert shown["resources"] == {
        "cpu": "1", "memory": "512Mi", "disk": "1Gi", "max_processes": 128,
    }  # fmt: skip
    assert shown["timeout"] == 300


def test_an_execution_has_the_fields_of_the_reference(api: Api, session: str) -> None:
    code = "import os\nos.mkdir('results')\nopen('results/output.csv', 'w').write('a,b\\n')"
    execution_id = api.run(session, code)["execution_id"]
    shown = api.execution(execution_id)

    assert {
        "id", "session_id", "code", "language", "status", "stdout", "stderr", "exit_code",
        "execution_time", "artifacts", "return_value", "metrics", "created_at", "completed_at",
    } <= set(shown)  # fmt: skip
    assert (shown["id"], shown["session_id"]) == (execution_id, session)
    assert (shown["code"], shown["language"], shown["status"]) == (code, "python", "completed")
    (artifact,) = shown["artifacts"]
    assert {
        "path", "size", "mime_type", "type", "created_at", "checksum", "download_url",
    } <= set(artifact)  # fmt: skip
    assert artifact["path"] == "results/output.csv"
    assert (artifact["size"], artifact["mime_type"]) == (4, "text/csv")
    assert artifact["type"] == "artifact"


def test_a_template_has_the_fields_of_the_reference(api: Api) -> None:
    assert {
        "id", "name", "image", "base_image", "pre_installed_packages", "default_resources",
        "security_context", "created_at",
    } <= set(answer(api.http.get(f"{V1}/templates/python")))  # fmt: skip


def test_a_runtime_has_the_fields_of_the_reference(api: Api) -> None:
    (node,) = answer(api.http.get(f"{V1}/runtimes"))["items"]

    assert set(node) == {
        "id", "type", "url", "status", "cpu_usage", "mem_usage", "session_count", "max_sessions",
        "cached_templates", "last_heartbeat", "failure_count",
    }  # fmt: skip
    assert node["status"] == "healthy"
    assert 0 <= node["cpu_usage"] <= 1
    assert 0 < node["mem_usage"] < 1
    assert is_timestamp(node["last_heartbeat"])
