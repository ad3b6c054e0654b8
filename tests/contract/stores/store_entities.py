"""Entities to put into a store: plain ones to vary, and strategies for odd ones."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from atoll import ids
from atoll.model.api_key import ApiKey, Scope
from atoll.model.checkpoint import Checkpoint, CheckpointRef
from atoll.model.execution import (
    Artifact,
    Attempt,
    Execution,
    ExecutionStatus,
    Language,
    Mode,
    Outcome,
    Request,
)
from atoll.model.image import ImageInfo, Registry
from atoll.model.install import Dependency, Install, InstallStatus
from atoll.model.instance import Handle, Instance
from atoll.model.resources import Resources
from atoll.model.session import (
    Cause,
    Durability,
    Session,
    SessionStatus,
    Wanted,
    Warning,
    WorkspaceMode,
)
from atoll.model.template import Build, Layer, Template, TemplateStatus
from atoll.model.volume import Volume, VolumeMount
from atoll.settings import SqliteSettings
from atoll.stores.base import Store

if TYPE_CHECKING:
    from atoll.model.page import Page

OpenFile = Callable[..., Awaitable[Store]]

PATIENT = SqliteSettings(busy_timeout=timedelta(seconds=60))
NOW = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
RESOURCES = Resources(cpu=0.5, memory=512 * 2**20, disk=2**40, max_processes=128)
ODD_TEXT = "NUL \0, half a pair \ud800 and \udcff, 𝄞, \r\n, '\";--, %s :id ?"
ODD_BYTES = b"\0\xff\xfe\xc3( \x80 'quoted' \r\n"

# Every example has its own ids, so that all can share a store.
shared = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def make_execution(**options: Any) -> Execution:
    fields: dict[str, Any] = {
        "id": ids.execution_id(NOW),
        "session_id": "sess_1",
        "request": Request(code="print(1)", language=Language.PYTHON),
        "status": ExecutionStatus.PENDING,
        "created_at": NOW,
    }
    return Execution(**(fields | options))


def completed(execution: Execution, **options: Any) -> Execution:
    fields: dict[str, Any] = {
        "status": ExecutionStatus.COMPLETED,
        "cause": Cause.EXIT,
        "exit_code": 0,
    }
    return replace(
        execution,
        status=ExecutionStatus.COMPLETED,
        started_at=NOW,
        completed_at=NOW + timedelta(microseconds=1),
        outcome=Outcome(**(fields | options)),
    )


def invoked(**options: Any) -> Execution:
    """An execution that is the first of an invocation."""
    execution = make_execution(**options)
    return replace(execution, invocation_id=ids.invocation_id(execution.id))


def following(previous: Execution, **options: Any) -> Execution:
    """The next execution of the invocation that this is the latest of."""
    fields: dict[str, Any] = {
        "session_id": previous.session_id,
        "invocation_id": previous.invocation_id,
        "ordinal": previous.ordinal + 1,
        "invoked_at": previous.invoked_at or previous.created_at,
    }
    return make_execution(**(fields | options))


def ended(execution: Execution, status: ExecutionStatus = ExecutionStatus.FAILED) -> Execution:
    return replace(completed(execution, status=status), status=status)


def make_session(**options: Any) -> Session:
    fields: dict[str, Any] = {
        "id": ids.session_id(),
        "template_id": "python",
        "status": SessionStatus.RUNNING,
        "wanted": Wanted.RUNNING,
        "runtime_type": "local",
        "runtime_node": "local",
        "resources": RESOURCES,
        "timeout": 300,
        "created_at": NOW,
        "updated_at": NOW,
        "expires_at": NOW + timedelta(seconds=300),
    }
    return Session(**(fields | options))


def make_instance(**options: Any) -> Instance:
    id, workspace = options.get("id") or ids.instance_id(), options.get("workspace", "ws_1")
    fields: dict[str, Any] = {
        "id": id,
        "node_id": "local",
        "template_id": "python",
        "template_version": 3,
        "workspace": workspace,
        "handle": Handle(id, "local", 1, {"pid": 17, "workspace": workspace}),
        "created_at": NOW,
    }
    return Instance(**(fields | options))


def make_template(**options: Any) -> Template:
    fields: dict[str, Any] = {
        "id": ids.template_id(),
        "name": "Python",
        "created_at": NOW,
        "updated_at": NOW,
        "default_resources": RESOURCES,
    }
    return Template(**(fields | options))


def make_key(**given: Any) -> ApiKey:
    id = given.pop("id", None) or ids.key_id()
    fields: dict[str, Any] = {
        "id": id,
        "name": "ci",
        "digest": id.encode().ljust(32, b"\xff"),
        "scope": Scope.FULL,
        "created_at": NOW,
    }
    return ApiKey(**(fields | given))


def make_checkpoint(**options: Any) -> Checkpoint:
    fields: dict[str, Any] = {
        "id": ids.session_id(),
        "number": 1,
        "manifest": "workspaces/sess_1/manifest/1",
        "created_at": NOW,
        "files": 3,
        "size": 2**40,
        "node_id": "local",
    }
    return Checkpoint(**(fields | options))


def make_volume(**options: Any) -> Volume:
    fields: dict[str, Any] = {
        "id": f"vol-{ids.session_id()}",
        "created_at": NOW,
        "size": 2**40,
        "kind": "local",
        "node_id": "local",
    }
    return Volume(**(fields | options))


async def walk(page: Callable[..., Awaitable[Page[Any]]], limit: int, **where: Any) -> list[Any]:
    """All items of a list, page by page."""
    items: list[Any] = []
    cursor: str | None = None
    while True:
        got = await page(cursor=cursor, limit=limit, **where)
        assert len(got.items) <= limit
        items += got.items
        if got.next_cursor is None:
            return items
        assert len(got.items) == limit
        cursor = got.next_cursor


# Any str except surrogate pairs: JSON encodes them like the character itself.
texts = st.text(st.characters(blacklist_categories=[]), max_size=40).filter(
    lambda text: text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass") == text
)
times = st.datetimes(
    min_value=datetime(1900, 1, 1),  # noqa: DTZ001 made aware by `timezones`
    max_value=datetime(2999, 1, 1),  # noqa: DTZ001
    timezones=st.just(UTC),
)
floats = st.floats(allow_nan=False)
whole = st.integers(-(2**63), 2**63 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
environments = st.dictionaries(texts, texts, max_size=3)
tuples_of_text = st.lists(texts, max_size=3).map(tuple)
artifacts = st.builds(
    Artifact,
    path=texts,
    size=st.integers(0, 2**63 - 1),
    mime_type=texts,
    created_at=times,
    checksum=st.none() | texts,
)
requests = st.builds(
    Request,
    code=st.none() | texts,
    language=st.none() | st.sampled_from(Language),
    command=st.none() | tuples_of_text,
    event=json_values,
    stdin=st.none() | texts,
    args=tuples_of_text,
    env=environments,
    cwd=st.none() | texts,
    timeout=floats,
    function_name=st.none() | texts,
    body=st.none() | st.binary(max_size=40).map(lambda data: base64.b64encode(data).decode()),
    content_type=st.none() | texts,
    context_id=st.none() | texts,
    terminal=st.none() | st.tuples(st.integers(1, 500), st.integers(1, 500)),
    stdin_open=st.booleans(),
    mode=st.sampled_from(Mode),
    metadata=environments,
)
attempts = st.builds(
    Attempt,
    started_at=times,
    ended_at=times,
    node_id=texts,
    instance_id=st.none() | texts,
    cause=st.none() | st.sampled_from(Cause),
    message=st.none() | texts,
)
outcomes = st.builds(
    Outcome,
    status=st.sampled_from(ExecutionStatus),
    cause=st.none() | st.sampled_from(Cause),
    exit_code=st.none() | st.integers(-255, 255),
    signal=st.none() | texts,
    error=st.none() | st.dictionaries(texts, json_values, max_size=3),
    stdout=st.binary(),
    stderr=st.binary(),
    stdout_size=st.integers(0, 2**63),
    stderr_size=st.integers(0, 2**63),
    return_json=st.none() | st.binary(),
    execution_time=floats,
    metrics=st.dictionaries(texts, floats, max_size=3),
    artifacts=st.lists(artifacts, max_size=3).map(tuple),
    artifacts_truncated=st.booleans(),
    results_json=st.none() | st.binary(),
    log=st.none()
    | st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2**31)), max_size=20).map(tuple),
)
executions = st.builds(
    make_execution,
    request=requests,
    status=st.sampled_from(ExecutionStatus),
    created_at=times,
    instance_id=st.none() | st.just("inst_1"),
    started_at=st.none() | times,
    completed_at=st.none() | times,
    retry_count=st.integers(0, 100),
    invocation_id=st.none() | st.builds(lambda: ids.invocation_id(ids.execution_id(NOW))),
    ordinal=st.integers(1, 2**63 - 1),
    superseded=st.booleans(),
    invoked_at=st.none() | times,
    attempts=st.lists(attempts, max_size=3).map(tuple),
    outcome=st.none() | outcomes,
    version=st.integers(1, 2**31 - 2),
)
resources = st.builds(
    Resources,
    # Not each database has infinity.
    cpu=st.floats(allow_nan=False, allow_infinity=False),
    memory=whole,
    disk=whole,
    max_processes=st.integers(0, 2**31 - 1),
)
installs = st.builds(
    Install,
    dependencies=st.lists(st.builds(Dependency, texts, texts), max_size=3).map(tuple),
    timeout=st.integers(0, 2**31),
    fail_on_error=st.booleans(),
    allow_conflicts=st.booleans(),
    status=st.sampled_from(InstallStatus),
    environment=st.none() | texts,
    installed=st.lists(texts, max_size=3).map(tuple),
    message=st.none() | texts,
)
sessions = st.builds(
    make_session,
    status=st.sampled_from(SessionStatus),
    wanted=st.sampled_from(Wanted),
    resources=resources,
    timeout=st.integers(0, 2**40),
    created_at=times,
    updated_at=times,
    expires_at=times,
    env_vars=environments,
    workspace=st.none() | texts,
    ended_at=st.none() | times,
    cause=st.none() | st.sampled_from(Cause),
    message=st.none() | texts,
    capacity=st.integers(1, 2**31 - 1),
    template_version=st.integers(1, 2**31 - 1),
    install=st.none() | installs,
    secrets=environments,
    volumes=st.lists(st.builds(VolumeMount, texts, texts, st.booleans()), max_size=3).map(tuple),
    workspace_mode=st.sampled_from(WorkspaceMode),
    durability=st.sampled_from(Durability),
    started_from=st.none() | st.just("sess_before"),
    warnings=st.lists(st.builds(Warning, texts, texts), max_size=3).map(tuple),
    labels=environments,
    node_labels=environments,
    auto_start=st.booleans(),
    idle_timeout=st.none() | st.integers(1, 2**40),
    archive_after=st.none() | st.integers(1, 2**40),
    delete_after=st.none() | st.integers(1, 2**40),
    active_at=st.none() | times,
    rested_at=st.none() | times,
    failures=st.integers(0, 2**31 - 1),
    retry_at=st.none() | times,
    version=st.integers(1, 2**31 - 2),
)
builds = st.builds(
    Build,
    debian_packages=tuples_of_text,
    python_packages=tuples_of_text,
    root=texts,
    layers=st.lists(st.builds(Layer, texts, tuples_of_text, st.booleans()), max_size=2).map(tuple),
    image=st.none()
    | st.builds(
        ImageInfo,
        digest=st.none() | texts,
        entrypoint=tuples_of_text,
        command=tuples_of_text,
    ),
    environment=st.none() | texts,
    installed=tuples_of_text,
    attempts=st.integers(0, 100),
    retry_at=st.none() | times,
    message=st.none() | texts,
)
templates = st.builds(
    make_template,
    name=texts,
    created_at=times,
    updated_at=times,
    default_resources=resources,
    image=texts,
    base_image=texts,
    require=tuples_of_text,
    python=texts,
    preload=tuples_of_text,
    env=environments,
    pool_size=st.integers(0, 2**31 - 1),
    pool_max=st.none() | st.integers(0, 2**31 - 1),
    runtime=st.from_regex(r"\A[A-Za-z0-9._-]{0,64}\Z"),
    dockerfile=texts,
    build_context=st.none() | st.from_regex(r"\A[0-9a-f]{64}\Z"),
    registry=st.none() | st.builds(Registry, server=texts, sealed=texts),
    number=st.integers(1, 2**31 - 4),
    status=st.sampled_from(TemplateStatus),
    build=st.none() | builds,
)
instances = st.builds(
    make_instance,
    template_version=st.integers(1, 2**31 - 1),
    workspace=texts,
    handle=st.builds(
        Handle,
        instance_id=texts,
        driver=texts,
        version=st.integers(1, 100),
        data=st.dictionaries(texts, texts | whole, max_size=3),
    ),
    created_at=times,
    session_id=st.none() | st.just("sess_1"),
)
keys = st.builds(
    make_key,
    name=texts,
    digest=st.binary(min_size=32, max_size=32),
    scope=st.sampled_from(Scope),
    created_at=times,
)
older = st.builds(
    CheckpointRef,
    number=st.integers(1, 2**63 - 1),
    manifest=st.just("workspaces/sess_1/manifests/1"),
    created_at=times,
    files=st.integers(0, 2**63 - 1),
    size=st.integers(0, 2**63 - 1),
    node_id=st.just("local"),
    settled=st.booleans(),
)
checkpoints = st.builds(
    make_checkpoint,
    settled=st.booleans(),
    older=st.lists(older, max_size=3).map(tuple),
    damaged=st.booleans(),
    number=st.integers(1, 2**63 - 1),
    created_at=times,
    files=st.integers(0, 2**63 - 1),
    size=st.integers(0, 2**63 - 1),
    kept_until=st.none() | times,
    version=st.integers(1, 2**31 - 2),
)
volumes = st.builds(
    make_volume,
    created_at=times,
    size=st.integers(0, 2**63 - 1),
    kind=st.sampled_from(("local", "s3")),
    node_id=st.none() | st.just("local"),
    version=st.integers(1, 2**31 - 2),
)
