"""Stored entities are returned unchanged."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta, timezone
from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from atoll import ids
from atoll.errors import Conflict, InvalidRequest
from atoll.model.execution import Artifact, ExecutionStatus, Request
from atoll.model.session import Cause, SessionStatus

from . import store_entities as make
from .store_entities import NOW, ODD_BYTES, ODD_TEXT, shared

if TYPE_CHECKING:
    from atoll.model.api_key import ApiKey
    from atoll.model.execution import Execution
    from atoll.model.instance import Instance
    from atoll.model.session import Session
    from atoll.model.template import Template
    from atoll.stores.base import Store

pytestmark = pytest.mark.anyio


async def test_a_database_keeps_its_id_and_its_secret(store: Store) -> None:
    cluster, secret = await store.cluster(), await store.secret()

    assert (await store.cluster(), await store.secret()) == (cluster, secret)
    assert len({cluster, secret}) == 2
    assert len(secret) == 64


@shared
@given(execution=make.executions)
async def test_an_execution_is_stored_unchanged(store: Store, execution: Execution) -> None:
    await store.executions.add(execution)

    assert await store.executions.get(execution.id) == execution


@shared
@given(execution=make.executions, later=make.executions)
async def test_a_save_changes_everything_but_the_request_of_an_execution(
    store: Store, execution: Execution, later: Execution
) -> None:
    await store.executions.add(execution)
    changed = replace(
        later,
        id=execution.id,
        session_id=execution.session_id,
        request=execution.request,
        invocation_id=execution.invocation_id,
        ordinal=execution.ordinal,
        superseded=execution.superseded,
        invoked_at=execution.invoked_at,
        created_at=execution.created_at,
        version=execution.version,
    )

    saved = await store.executions.save(changed)

    assert saved == replace(changed, version=execution.version + 1)
    assert await store.executions.get(execution.id) == saved


@shared
@given(session=make.sessions, later=make.sessions)
async def test_a_session_is_stored_unchanged(
    store: Store, session: Session, later: Session
) -> None:
    await store.sessions.add(session)
    assert await store.sessions.get(session.id) == session

    saved = await store.sessions.save(replace(later, id=session.id, version=session.version))

    assert saved == replace(later, id=session.id, version=session.version + 1)
    assert await store.sessions.get(session.id) == saved


@shared
@given(template=make.templates, later=make.templates)
async def test_a_template_is_stored_unchanged(
    store: Store, template: Template, later: Template
) -> None:
    await store.templates.add(template)
    assert await store.templates.get(template.id) == template

    saved = await store.templates.save(replace(later, id=template.id))

    assert saved == replace(later, id=template.id, version=2)
    assert await store.templates.get(template.id) == saved


@shared
@given(instance=make.instances)
async def test_an_instance_is_stored_unchanged(store: Store, instance: Instance) -> None:
    await store.instances.add(instance)

    assert await store.instances.get(instance.id) == instance
    assert instance in await store.instances.all()


async def test_ready_instances_of_other_replicas_are_counted(store: Store) -> None:
    node, mine, theirs = ids.session_id(), "replica-mine", "replica-theirs"
    for template_id, holder, session_id in (
        ("a", theirs, None), ("a", theirs, None), ("b", "replica-third", None),
        ("a", mine, None), ("b", None, "sess_1"),
    ):  # fmt: skip
        await store.instances.add(
            make.make_instance(
                node_id=node, template_id=template_id, holder=holder, session_id=session_id
            )
        )
    await store.instances.add(make.make_instance(node_id=ids.session_id(), holder=theirs))

    assert await store.instances.count_unclaimed(node, except_holder=mine) == {"a": 2, "b": 1}
    assert await store.instances.count_unclaimed(node, except_holder=theirs) == {"a": 1, "b": 1}
    assert await store.instances.count_unclaimed(ids.session_id(), except_holder=mine) == {}


@shared
@given(key=make.keys)
async def test_a_key_comes_back_equal(store: Store, key: ApiKey) -> None:
    await store.api_keys.add(key)
    try:
        assert await store.api_keys.all() == [key]
    finally:
        await store.api_keys.remove(key.id)


async def test_unusual_text_and_bytes_are_stored_unchanged(store: Store) -> None:
    execution = make.completed(
        make.make_execution(
            request=Request(
                code=ODD_TEXT,
                command=(ODD_TEXT, ""),
                event={ODD_TEXT: [ODD_TEXT, None, 1.5, True]},
                stdin=ODD_TEXT,
                env={ODD_TEXT: ODD_TEXT},
            )
        ),
        stdout=ODD_BYTES,
        stderr=ODD_BYTES,
        return_json=ODD_BYTES,
        error={"message": ODD_TEXT},
        artifacts=(Artifact(ODD_TEXT, 2**40, "text/plain", NOW, None),),
    )
    session = make.make_session(message=ODD_TEXT, env_vars={ODD_TEXT: ""}, workspace=ODD_TEXT)

    await store.executions.add(execution)
    await store.sessions.add(session)

    assert await store.executions.get(execution.id) == execution
    assert await store.sessions.get(session.id) == session


async def test_null_and_empty_values_are_distinct(store: Store) -> None:
    nothing = make.make_execution(request=Request(code=None, command=None, stdin=None, cwd=None))
    empty = make.completed(
        make.make_execution(request=Request(code="", command=(), stdin="", cwd="")),
        return_json=b"",
        error={},
        signal="",
    )
    absent = make.completed(make.make_execution(), return_json=None, error=None, signal=None)
    for execution in (nothing, empty, absent):
        await store.executions.add(execution)

    for execution in (nothing, empty, absent):
        got = await store.executions.get(execution.id)
        assert got == execution
        assert repr(got) == repr(execution)


async def test_megabytes_of_code_and_output_are_stored_unchanged(store: Store) -> None:
    execution = make.completed(
        make.make_execution(request=Request(code="é" * 1_000_000)),
        stdout=bytes(range(256)) * 8192,
        return_json=b"1" * 2**20,
    )

    await store.executions.add(execution)

    assert await store.executions.get(execution.id) == execution


async def test_a_time_keeps_its_microseconds_and_is_returned_in_utc(store: Store) -> None:
    zone = timezone(timedelta(hours=5, minutes=30))
    session = make.make_session(created_at=NOW.astimezone(zone))

    await store.sessions.add(session)

    got = await store.sessions.get(session.id)
    assert got is not None
    assert got.created_at.isoformat() == "2026-03-01T12:00:00.123456+00:00"


async def test_enums_are_restored(store: Store) -> None:
    session = make.make_session(status=SessionStatus.FAILED, cause=Cause.OOM)
    execution = make.make_execution(status=ExecutionStatus.RUNNING)
    await store.sessions.add(session)
    await store.executions.add(execution)

    got_session = await store.sessions.get(session.id)
    got_execution = await store.executions.get(execution.id)

    assert got_session is not None
    assert isinstance(got_session.cause, Cause)
    assert got_session.status.ended
    assert got_execution is not None
    assert not got_execution.status.ended


async def test_missing_rows_read_as_null(store: Store) -> None:
    assert await store.sessions.get("sess_none") is None
    assert await store.executions.get("") is None
    assert await store.instances.get("x" * 1000) is None
    assert await store.templates.get("' OR 1=1 --") is None


async def test_adding_an_existing_id_is_refused_and_changes_nothing(store: Store) -> None:
    session, execution = make.make_session(), make.make_execution()
    template, instance, key = make.make_template(), make.make_instance(), make.make_key()
    await store.sessions.add(session)
    await store.executions.add(execution)
    await store.templates.add(template)
    await store.instances.add(instance)
    await store.api_keys.add(key)

    with pytest.raises(Conflict, match=session.id):
        await store.sessions.add(replace(session, timeout=1))
    with pytest.raises(Conflict, match=execution.id):
        await store.executions.add(replace(execution, retry_count=1))
    with pytest.raises(Conflict, match=template.id):
        await store.templates.add(replace(template, name="other"))
    with pytest.raises(Conflict, match=instance.id):
        await store.instances.add(replace(instance, node_id="other"))
    with pytest.raises(Conflict, match=key.id):
        await store.api_keys.add(replace(key, digest=b"other"))

    assert await store.sessions.get(session.id) == session
    assert await store.executions.get(execution.id) == execution
    assert await store.templates.get(template.id) == template
    assert await store.instances.get(instance.id) == instance
    assert await store.api_keys.all() == [key]


async def test_adding_a_key_with_a_known_digest_does_nothing(store: Store) -> None:
    key = make.make_key(name="first")
    await store.api_keys.add(key)

    await store.api_keys.add(make.make_key(name="second", digest=key.digest))

    assert await store.api_keys.all() == [key]


async def test_remove_returns_whether_it_existed(store: Store) -> None:
    template, instance, key = make.make_template(), make.make_instance(), make.make_key()
    await store.templates.add(template)
    await store.instances.add(instance)
    await store.api_keys.add(key)

    assert await store.templates.remove(template.id) is True
    assert await store.templates.remove(template.id) is False
    assert await store.api_keys.remove(key.id) is True
    assert await store.api_keys.remove(key.id) is False
    await store.instances.remove(instance.id)
    await store.instances.remove(instance.id)

    assert await store.templates.get(template.id) is None
    assert await store.instances.all() == []
    assert await store.api_keys.all() == []


async def test_an_id_with_invalid_text_is_refused(store: Store) -> None:
    with pytest.raises(InvalidRequest):
        await store.sessions.add(make.make_session(id="sess_\ud800"))
    with pytest.raises(InvalidRequest):
        await store.sessions.get("sess_\ud800")
