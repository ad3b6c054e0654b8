"""Responses have the fields and types that their schemas describe."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from atoll.api.rest.schemas import (
    checkpoints,
    contexts,
    executions,
    files,
    invocations,
    nodes,
    pools,
    resources,
    sessions,
    templates,
    volumes,
    webhooks,
)
from atoll.api.rest.schemas.base import encoder_of, timestamp
from atoll.model.checkpoint import Checkpoint
from atoll.model.execution import Artifact, Execution, ExecutionStatus, Outcome, Request
from atoll.model.fields import descriptions_of
from atoll.model.image import ImageInfo, Registry
from atoll.model.invocation import invocation_of
from atoll.model.node import Drain, Node, NodeMetrics
from atoll.model.plan import Observed
from atoll.model.resources import Resources
from atoll.model.session import Cause, Session, SessionStatus, Wanted
from atoll.model.template import Build, Template
from atoll.model.volume import Volume
from atoll.model.webhook import Webhook
from atoll.sdk import values
from atoll.sdk.decode import decode
from atoll.service.contexts.service import Context
from atoll.service.files.types import FileInfo
from atoll.service.pool.service import PoolPlan, PoolStatus

if TYPE_CHECKING:
    from pydantic import BaseModel

NOW = datetime(2025, 1, 4, 10, 30, tzinfo=UTC)
RESOURCES = Resources(1.0, 512 * 2**20, 2**30, 128)
ARTIFACT = Artifact("a", 1, "text/plain", NOW, "ab")
OUTCOME = Outcome(
    ExecutionStatus.COMPLETED,
    None,
    0,
    return_json=b'{"a": 1}',
    metrics={
        "duration_ms": 1.0, "cpu_time_ms": 1.0, "peak_memory_mb": 1.0, "bytes_read": 0,
        "bytes_written": 0,
    },
    artifacts=(ARTIFACT,),
)  # fmt: skip
RUNNING = Execution("exec_1", "sess_1", Request(code="1"), ExecutionStatus.RUNNING, NOW)
ENDED = replace(RUNNING, status=ExecutionStatus.COMPLETED, outcome=OUTCOME, completed_at=NOW)
KEPT = {
    part: f"executions/20250104/exec_1/{part}-9-ab"
    for part in ("request", "stdout", "stderr", "return_json")
}
LONG = replace(
    ENDED,
    outcome=replace(OUTCOME, stdout=b"head", stdout_size=9, return_json=None, stderr=b"x" * 9),
    kept=KEPT,
)
SESSION = Session(
    "sess_1", "python", SessionStatus.RUNNING, Wanted.RUNNING, "local", "local", RESOURCES, 300,
    NOW, NOW, NOW,
)  # fmt: skip
TEMPLATE = Template("t", "T", NOW, NOW, RESOURCES, require=("seccomp",))
BUILT = replace(
    TEMPLATE,
    registry=Registry("r", "sealed"),
    build=Build(("git",), ("polars",), image=ImageInfo("sha256:1", ("run",))),
)
NODE = Node(
    "n",
    "docker",
    "http://n",
    provides=frozenset({"seccomp", "volumes"}),
    metrics=NodeMetrics(0.123456, 0.5, 1, 2, 3, 0.1),
    templates=("python@1", "python@2"),
    seen_at=NOW,
    drain=Drain(2, 1),
)
INVOCATION = invocation_of(replace(ENDED, invocation_id="inv_1"))
POOL = PoolStatus(PoolPlan(TEMPLATE, 1, 2, 1, 1), 1, 0, 0, 0.5, None, 1, 0, 0, 1.23456)
ENTRY = FileInfo("dir/a", "file", 1, 0o644, NOW)

RESPONSES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "resources": (resources.ResourcesOut, encoder_of(resources.ResourcesOut)(RESOURCES)),
    "session": (sessions.SessionOut, sessions.session_out(SESSION)),
    "an ended session": (
        sessions.SessionOut,
        sessions.session_out(
            replace(SESSION, status=SessionStatus.TIMEOUT, ended_at=NOW, cause=Cause.TIMEOUT)
        ),
    ),
    "submitted": (executions.Submitted, executions.submitted_out(RUNNING)),
    "result": (executions.ResultOut, executions.result_out(ENDED, OUTCOME)),
    "metrics": (executions.MetricsOut, executions.result_out(ENDED, OUTCOME)["metrics"]),
    "status": (executions.StatusOut, executions.status_out(RUNNING)),
    "status at the end": (executions.StatusOut, executions.status_out(ENDED)),
    "artifact": (executions.ArtifactOut, executions.artifact_out(ARTIFACT)),
    "execution": (executions.ExecutionOut, executions.execution_out(RUNNING)),
    "execution at the end": (executions.ExecutionOut, executions.execution_out(ENDED)),
    "execution with parts in the blob store": (
        executions.ExecutionOut,
        executions.execution_out(LONG),
    ),
    "template": (templates.TemplateOut, templates.template_out(TEMPLATE)),
    "a built template": (templates.TemplateOut, templates.template_out(BUILT)),
    "node": (nodes.NodeOut, nodes.node_out(NODE)),
    "a node that has just started": (nodes.NodeOut, nodes.node_out(Node("n", "local", "http://n"))),
    "runtime": (nodes.RuntimeOut, nodes.runtime_out(NODE)),
    "health of a runtime": (nodes.RuntimeHealth, nodes.runtime_health_out(NODE)),
    "metrics of a runtime": (nodes.RuntimeMetrics, nodes.runtime_metrics_out(NODE)),
    "checkpoint": (
        checkpoints.CheckpointOut,
        checkpoints.checkpoint_out(Checkpoint("sess_1", 1, "m", NOW, 1, 1, "n")),
    ),
    "context": (
        contexts.ContextOut,
        contexts.context_out(Context("ctx_1", "sess_1", "python", "/workspace", "idle", NOW, 0)),
    ),
    "invocation": (invocations.InvocationOut, invocations.invocation_out(INVOCATION)),
    "invocation at the end": (
        invocations.InvocationOut,
        invocations.invocation_out(INVOCATION, ENDED),
    ),
    "pool": (pools.PoolOut, pools.pool_out(POOL)),
    "volume": (volumes.VolumeOut, volumes.volume_out(Volume("v", NOW, 0, "s3"))),
    "webhook": (
        webhooks.WebhookOut,
        webhooks.webhook_out(Webhook("hook_1", NOW, "https://a", "s", ("session.*",), 0)),
    ),
    "entry": (files.EntryOut, files.entry_out(ENTRY)),
}


@pytest.mark.parametrize(("schema", "response"), RESPONSES.values(), ids=RESPONSES.keys())
def test_a_response_has_the_fields_that_are_described(
    schema: type[BaseModel], response: dict[str, Any]
) -> None:
    # Added only to responses from memory.
    assert set(response) == set(schema.model_fields) - {"stale"}


@pytest.mark.parametrize(("schema", "response"), RESPONSES.values(), ids=RESPONSES.keys())
def test_a_response_has_the_types_that_are_described(
    schema: type[BaseModel], response: dict[str, Any]
) -> None:
    schema.model_validate(response)


def test_the_result_of_a_lost_instance_has_all_fields() -> None:
    outcome = Outcome(
        ExecutionStatus.CRASHED, Cause.INSTANCE_LOST, None, error={"code": "x", "message": "y"}
    )
    answer = executions.result_out(replace(ENDED, outcome=outcome), outcome)

    assert executions.ResultOut.model_validate(answer).status == "error"
    assert answer["metrics"] is None


def test_an_execution_lists_its_shortened_fields() -> None:
    answer = executions.execution_out(LONG)

    assert answer["shortened"] == ["code", "stdout", "return_value"]
    assert (answer["stdout"], answer["stdout_truncated"]) == ("head", True)
    assert answer["stdout_bytes"] == 9
    command = replace(LONG, request=Request(command=("ls",)))
    assert executions.execution_out(command)["shortened"][0] == "command"
    assert executions.execution_out(ENDED)["shortened"] == []


def test_a_result_lists_its_shortened_fields() -> None:
    assert LONG.outcome is not None

    assert executions.result_out(LONG, LONG.outcome)["shortened"] == ["stdout", "return_value"]
    assert executions.result_out(ENDED, OUTCOME)["shortened"] == []


def test_the_sdk_decodes_shortened_fields() -> None:
    assert LONG.outcome is not None
    result = decode(values.Result, executions.result_out(LONG, LONG.outcome))
    info = decode(values.ExecutionInfo, executions.execution_out(LONG))

    assert result.shortened == ("stdout", "return_value")
    assert info.shortened == ("code", "stdout", "return_value")
    older = executions.execution_out(ENDED)
    del older["shortened"]
    assert decode(values.ExecutionInfo, older).shortened == ()


def test_times_are_utc_with_a_z() -> None:
    assert timestamp(NOW) == "2025-01-04T10:30:00Z"
    assert timestamp(NOW.replace(microsecond=5)) == "2025-01-04T10:30:00.000005Z"
    assert timestamp(None) is None


def test_every_status_is_described() -> None:
    def words(model: type[BaseModel]) -> set[str]:
        return set(model.model_json_schema()["properties"]["status"]["enum"])

    described = sessions.SessionOut.model_json_schema()["$defs"]
    assert set(described["SessionStatus"]["enum"]) == set(SessionStatus)
    assert set(described["Wanted"]["enum"]) == set(Wanted)
    assert set(described["Observed"]["enum"]) == set(Observed)
    assert words(executions.ExecutionOut) == words(executions.StatusOut) == set(ExecutionStatus)


def test_a_field_of_a_session_is_declared_once_for_create_update_and_response() -> None:
    shared = set(sessions.SessionFields.model_fields)

    for schema in (sessions.CreateSession, sessions.UpdateSession, sessions.SessionOut):
        assert shared <= set(schema.model_fields)
    created = sessions.CreateSession(auto_start=False, archive_after=0)
    assert created.new_session().fields == {"auto_start": False, "archive_after": 0}
    changed = sessions.UpdateSession(auto_start=False, archive_after=0, delete_after=5)
    assert changed.change().fields == {
        "auto_start": False,
        "archive_after": None,
        "delete_after": 5,
    }
    assert sessions.UpdateSession().change().fields == {}


def test_the_bounds_of_a_request_do_not_appear_in_responses() -> None:
    def schema_of(model: type[BaseModel]) -> dict[str, Any]:
        found: dict[str, Any] = model.model_json_schema()["properties"]["delete_after"]
        return found

    assert schema_of(sessions.CreateSession)["anyOf"][0]["minimum"] == 0
    assert schema_of(sessions.UpdateSession)["anyOf"][0]["minimum"] == 0
    assert schema_of(sessions.SessionOut)["anyOf"] == [{"type": "integer"}, {"type": "null"}]
    assert "delete_after" in sessions.SessionOut.model_json_schema()["required"]


def test_fields_are_described_by_the_model() -> None:
    described = sessions.SessionOut.model_json_schema()["properties"]

    assert described["capacity"]["description"] == descriptions_of(Session)["capacity"]
    assert described["dependencies"]["description"] == descriptions_of(Session)["install"]
