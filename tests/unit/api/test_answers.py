"""The answer functions and the classes that describe them say the same."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from atoll.api.rest import answers, files, requests, schemas
from atoll.model.execution import Artifact, Execution, ExecutionStatus, Outcome, Request
from atoll.model.plan import Observed
from atoll.model.resources import Resources
from atoll.model.session import Cause, Session, SessionStatus, Wanted
from atoll.model.template import REQUIREMENTS, Template
from atoll.sdk import values
from atoll.sdk.decode import decode
from atoll.service.files.types import FileInfo

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
ENTRY = FileInfo("dir/a", "file", 1, 0o644, NOW)

ANSWERS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "resources": (schemas.ResourcesOut, answers.resources_out(RESOURCES)),
    "session": (schemas.SessionOut, answers.session_out(SESSION)),
    "an ended session": (
        schemas.SessionOut,
        answers.session_out(
            replace(SESSION, status=SessionStatus.TIMEOUT, ended_at=NOW, cause=Cause.TIMEOUT)
        ),
    ),
    "submitted": (schemas.Submitted, answers.submitted_out(RUNNING)),
    "result": (schemas.ResultOut, answers.result_out(ENDED, OUTCOME)),
    "metrics": (schemas.MetricsOut, answers.result_out(ENDED, OUTCOME)["metrics"]),
    "status": (schemas.StatusOut, answers.status_out(RUNNING)),
    "status at the end": (schemas.StatusOut, answers.status_out(ENDED)),
    "artifact": (schemas.ArtifactOut, answers.artifact_out(ARTIFACT)),
    "execution": (schemas.ExecutionOut, answers.execution_out(RUNNING)),
    "execution at the end": (schemas.ExecutionOut, answers.execution_out(ENDED)),
    "execution of which parts are elsewhere": (
        schemas.ExecutionOut,
        answers.execution_out(LONG),
    ),
    "template": (schemas.TemplateOut, answers.template_out(TEMPLATE)),
    "entry": (schemas.EntryOut, files._entry_out(ENTRY)),
}


@pytest.mark.parametrize(("described", "answer"), ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_has_the_fields_that_are_described(
    described: type[BaseModel], answer: dict[str, Any]
) -> None:
    # Which is only there when it comes from memory.
    assert set(answer) == set(described.model_fields) - {"stale"}


@pytest.mark.parametrize(("described", "answer"), ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_has_the_types_that_are_described(
    described: type[BaseModel], answer: dict[str, Any]
) -> None:
    described.model_validate(answer)


def test_a_result_that_was_lost_has_the_fields_too() -> None:
    outcome = Outcome(
        ExecutionStatus.CRASHED, Cause.INSTANCE_LOST, None, error={"code": "x", "message": "y"}
    )
    answer = answers.result_out(replace(ENDED, outcome=outcome), outcome)

    assert schemas.ResultOut.model_validate(answer).status == "error"
    assert answer["metrics"] is None


def test_an_execution_says_which_of_its_fields_are_cut_short() -> None:
    answer = answers.execution_out(LONG)

    assert answer["shortened"] == ["code", "stdout", "return_value"]
    assert (answer["stdout"], answer["stdout_truncated"]) == ("head", True)
    assert answer["stdout_bytes"] == 9
    command = replace(LONG, request=Request(command=("ls",)))
    assert answers.execution_out(command)["shortened"][0] == "command"
    assert answers.execution_out(ENDED)["shortened"] == []


def test_a_result_says_which_of_its_fields_are_cut_short() -> None:
    assert LONG.outcome is not None

    assert answers.result_out(LONG, LONG.outcome)["shortened"] == ["stdout", "return_value"]
    assert answers.result_out(ENDED, OUTCOME)["shortened"] == []


def test_the_client_understands_what_is_cut_short() -> None:
    assert LONG.outcome is not None
    result = decode(values.Result, answers.result_out(LONG, LONG.outcome))
    info = decode(values.ExecutionInfo, answers.execution_out(LONG))

    assert result.shortened == ("stdout", "return_value")
    assert info.shortened == ("code", "stdout", "return_value")
    older = answers.execution_out(ENDED)
    del older["shortened"]
    assert decode(values.ExecutionInfo, older).shortened == ()


def test_times_are_utc_with_a_z() -> None:
    assert answers.timestamp(NOW) == "2025-01-04T10:30:00Z"
    assert answers.timestamp(NOW.replace(microsecond=5)) == "2025-01-04T10:30:00.000005Z"
    assert answers.timestamp(None) is None


def test_every_status_is_described() -> None:
    def words(model: type[BaseModel]) -> set[str]:
        return set(model.model_json_schema()["properties"]["status"]["enum"])

    described = schemas.SessionOut.model_json_schema()["$defs"]
    assert set(described["SessionStatus"]["enum"]) == set(SessionStatus)
    assert set(described["Wanted"]["enum"]) == set(Wanted)
    assert set(described["Observed"]["enum"]) == set(Observed)
    assert words(schemas.ExecutionOut) == words(schemas.StatusOut) == set(ExecutionStatus)


def test_what_a_template_requires_is_one_of_the_known_names() -> None:
    requests.SecurityContext(require=list(REQUIREMENTS))
    with pytest.raises(ValidationError):
        requests.SecurityContext(require=["magic"])


def test_limits_come_from_the_base_where_none_are_given() -> None:
    wanted = requests.CreateSession(memory="1Gi").limits(RESOURCES)

    assert wanted == replace(RESOURCES, memory=2**30)
    nested = requests.CreateSession(resources=requests.ResourcesIn(cpu="2")).limits(RESOURCES)
    assert nested == replace(RESOURCES, cpu=2.0)


@pytest.mark.parametrize("event", [float("nan"), [float("inf")], {"a": -float("inf")}], ids=str)
def test_an_event_that_json_cannot_hold_is_refused(event: Any) -> None:
    with pytest.raises(ValidationError):
        requests.Execute(code="1", event=event)


@pytest.mark.parametrize("event", [None, 0, "", [], {}, {"a": [1, None]}], ids=str)
def test_an_event_is_any_json(event: Any) -> None:
    assert requests.Execute(code="1", event=event).event == event
