"""
Offloaded parts are restored unchanged, rows stay small, and small executions have no overhead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from atoll.blobs.base import MAX_GET
from atoll.blobs.obstore_blobs import ObstoreBlobs
from atoll.errors import BlobsUnavailable, PermanentError, TemporaryError
from atoll.model.execution import Execution, Request
from atoll.service.executions.offload import Offload, shortened
from tests.contract.stores import store_entities as make
from tests.contract.stores.store_entities import ODD_BYTES, ODD_TEXT

LIMIT, HEAD = 1024, 16
OUTPUTS = ("stdout", "stderr", "return_json", "results_json")
LARGE = b"0123456789" * 200
ODD = make.completed(
    make.make_execution(
        request=Request(
            code=ODD_TEXT,
            command=(ODD_TEXT, ""),
            event={ODD_TEXT: [ODD_TEXT, None, 1.5, True, 2**70]},
            stdin=ODD_TEXT,
            args=("", ODD_TEXT),
            env={"A": ODD_TEXT},
            body="AP8=",
            terminal=(24, 80),
        )
    ),
    stdout=ODD_BYTES,
    stderr=ODD_BYTES,
    return_json=b"null",
    results_json=ODD_BYTES,
    log=((1, 3), (2, 2**40)),
)


class MemoryBlobs(ObstoreBlobs):
    """A blob store in a dictionary, which can be unavailable."""

    def __init__(self) -> None:
        super().__init__(MemoryStore, concurrency=1)
        self.objects: dict[str, bytes] = {}
        self.puts = 0
        self.away = False

    async def put(self, key: str, data: bytes) -> None:
        if self.away:
            raise BlobsUnavailable("away")
        self.puts += 1
        self.objects[key] = data

    async def get(
        self, key: str, *, start: int = 0, end: int | None = None, limit: int = MAX_GET
    ) -> bytes | None:
        if self.away:
            raise BlobsUnavailable("away")
        return self.objects[key][start:end] if key in self.objects else None

    async def remove(self, key: str, *, deferrable: bool = True) -> None:
        self.objects.pop(key, None)

    async def remove_all(self, prefix: str, *, deferrable: bool = True) -> None:
        for key in [key for key in self.objects if key.startswith(prefix)]:
            del self.objects[key]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


@pytest.fixture
def bulk(blobs: MemoryBlobs) -> Offload:
    return Offload(blobs, inline_limit=LIMIT, head=HEAD)


def run_now(coroutine: Any) -> Any:
    """What a coroutine gives that awaits nothing."""
    with pytest.raises(StopIteration) as stopped:
        coroutine.send(None)
    return stopped.value.value


def request_of_size(size: int, **options: Any) -> Request:
    """A request whose fields are so many bytes of JSON together."""
    fields: dict[str, Any] = dict.fromkeys(("code", "command", "event", "stdin", "args", "env"))
    fields |= {"code": "", "event": {}, "args": (), "env": {}} | options
    bare = len(json.dumps(fields, separators=(",", ":")))
    return Request(**({"event": {}} | options), code="x" * (size - bare))


everything = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@everything
@given(
    execution=make.executions,
    limit=st.sampled_from([0, 20, 110, 200, 10_000]),
    head=st.sampled_from([0, 3, 50]),
)
@example(execution=ODD, limit=0, head=3)
def test_an_offloaded_execution_is_restored_unchanged(
    runner: asyncio.Runner, execution: Execution, limit: int, head: int
) -> None:
    blobs = MemoryBlobs()
    bulk = Offload(blobs, inline_limit=limit, head=head)

    row = runner.run(bulk.store(execution))

    assert runner.run(bulk.fetch(row)) == execution
    assert runner.run(bulk.request_of(row)) == execution.request
    assert set(blobs.objects) == set(row.kept.values())
    # A second time changes nothing: the beginning of a part is not offloaded instead.
    puts = blobs.puts
    assert runner.run(bulk.store(row)) is row
    assert blobs.puts == puts


@everything
@given(execution=make.executions, limit=st.sampled_from([0, 20, 110, 200]))
def test_no_part_of_a_row_exceeds_the_limit_and_the_head(
    runner: asyncio.Runner, execution: Execution, limit: int
) -> None:
    bulk = Offload(MemoryBlobs(), inline_limit=limit, head=5)

    row = runner.run(bulk.store(execution))

    for part in OUTPUTS:
        content = getattr(row.outcome, part, None) or b""
        assert len(content) <= (5 if part in row.kept else limit)
    request = row.request
    if "request" in row.kept:
        assert len(request.code or "") + len("".join(request.command or ())) <= 10
        assert (request.event, request.stdin, request.args, request.env) == (None, None, (), {})
        assert request.body is None
    else:
        fields = {name: getattr(request, name) for name in ("code", "event", "stdin", "env")}
        more = {"command": request.command, "args": request.args}
        if request.body is not None:
            fields["body"] = request.body
        assert len(json.dumps(fields | more, separators=(",", ":"))) <= limit
    assert 12 * len((row.outcome and row.outcome.log) or ()) <= limit
    for name in ("function_name", "content_type", "context_id", "terminal", "stdin_open"):
        assert getattr(row.request, name) == getattr(execution.request, name)
    assert (row.request.code is None) == (execution.request.code is None)
    assert (row.request.command is None) == (execution.request.command is None)


@pytest.mark.parametrize("part", OUTPUTS)
def test_output_at_the_limit_stays_in_the_row_and_longer_output_is_offloaded(
    bulk: Offload, blobs: MemoryBlobs, runner: asyncio.Runner, part: str
) -> None:
    at_bound = make.completed(make.make_execution(), **{part: b"x" * LIMIT})
    beyond = make.completed(make.make_execution(), **{part: b"x" * (LIMIT + 1)})

    assert run_now(bulk.store(at_bound)) is at_bound
    row = runner.run(bulk.store(beyond))

    assert set(row.kept) == {part}
    assert list(blobs.objects.values()) == [b"x" * (LIMIT + 1)]
    left = None if part.endswith("_json") else b"x" * HEAD
    assert getattr(row.outcome, part) == left


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"stdin": "in"},
        {"event": {"a": [1, 2.5, None, "ä", {"b": "𝄞\n"}]}},
        {"args": ("a", "b"), "env": {"A": "1"}},
        {"body": "AP8=" * 20},
        {"stdin": "\ud800\0" * 30},
    ],
    ids=["code", "stdin", "event", "arguments", "body", "odd text"],
)
def test_a_request_at_the_limit_stays_in_the_row_and_a_larger_one_is_offloaded(
    bulk: Offload, runner: asyncio.Runner, given: dict[str, Any]
) -> None:
    at_bound = make.make_execution(request=request_of_size(LIMIT, **given))
    beyond = make.make_execution(request=request_of_size(LIMIT + 1, **given))

    assert run_now(bulk.store(at_bound)) is at_bound
    row = runner.run(bulk.store(beyond))

    assert set(row.kept) == {"request"}
    assert row.request.code == "x" * HEAD
    assert runner.run(bulk.fetch(row)) == beyond


def test_a_large_event_is_detected_wherever_its_size_comes_from(
    bulk: Offload, runner: asyncio.Runner
) -> None:
    long = "x" * LIMIT
    events: list[Any] = [long, [[[long]]], {long: 1}, {"a": {"b": [long]}}, [0] * LIMIT, [[]] * 500]

    for event in events:
        execution = make.make_execution(request=Request(code="", event=event))
        row = runner.run(bulk.store(execution))
        assert set(row.kept) == {"request"}
        assert runner.run(bulk.fetch(row)) == execution


def test_a_long_log_is_stored_as_a_blob_and_not_listed_as_shortened(
    bulk: Offload, blobs: MemoryBlobs, runner: asyncio.Runner
) -> None:
    few = make.completed(make.make_execution(), log=((1, 10),) * (LIMIT // 12))
    many = make.completed(make.make_execution(), log=((1, 10), (2, 7)) * LIMIT)

    assert run_now(bulk.store(few)) is few
    row = runner.run(bulk.store(many))

    assert set(row.kept) == {"log"}
    assert row.outcome is not None
    assert row.outcome.log is None
    assert shortened(row) == []
    assert runner.run(bulk.fetch(row)) == many
    blobs.objects.clear()
    assert runner.run(bulk.fetch(row)) == row


def test_a_large_body_is_offloaded_with_the_request(bulk: Offload, runner: asyncio.Runner) -> None:
    request = Request(
        function_name="main:handle", body="AP8=" * LIMIT, content_type="image/png", terminal=(2, 3)
    )
    execution = make.make_execution(request=request)

    row = runner.run(bulk.store(execution))

    assert row.request == replace(request, body=None)
    assert shortened(row) == []
    assert runner.run(bulk.fetch(row)) == execution


def test_a_small_execution_is_unchanged_and_nothing_is_awaited(
    bulk: Offload, blobs: MemoryBlobs
) -> None:
    blobs.away = True
    execution = make.completed(make.make_execution(), stdout=b"42\n", stdout_size=3)

    assert run_now(bulk.store(execution)) is execution
    assert run_now(bulk.fetch(execution)) is execution
    assert run_now(bulk.request_of(execution)) is execution.request


def test_a_row_with_an_offloaded_request_keeps_it_when_it_ends(
    bulk: Offload, runner: asyncio.Runner
) -> None:
    execution = make.make_execution(request=Request(code="x" * 5000, env={"A": "1"}))
    row = runner.run(bulk.store(execution))

    ended = runner.run(bulk.store(make.completed(row, stdout=LARGE)))

    assert set(ended.kept) == {"request", "stdout"}
    assert runner.run(bulk.fetch(ended)) == make.completed(execution, stdout=LARGE)


def test_the_same_save_repeated_writes_the_same_objects(
    bulk: Offload, blobs: MemoryBlobs, runner: asyncio.Runner
) -> None:
    execution = make.completed(make.make_execution(), stdout=LARGE, stderr=LARGE)

    rows = [runner.run(bulk.store(execution)) for _ in range(3)]

    assert rows[0] == rows[1] == rows[2]
    assert len(blobs.objects) == 2


def test_two_results_of_one_execution_are_independent(
    bulk: Offload, runner: asyncio.Runner
) -> None:
    pending = make.make_execution()
    one, other = (make.completed(pending, stdout=LARGE + end) for end in (b"1", b"2"))

    stored = runner.run(bulk.store(one))
    runner.run(bulk.store(other))

    assert runner.run(bulk.fetch(stored)) == one


@pytest.mark.parametrize("damage", [None, b"", LARGE[:-1]], ids=["gone", "empty", "cut"])
def test_the_beginning_of_a_lost_part_remains_and_it_is_marked(
    bulk: Offload, blobs: MemoryBlobs, runner: asyncio.Runner, damage: bytes | None
) -> None:
    execution = make.completed(make.make_execution(), stdout=LARGE, stderr=LARGE, return_json=LARGE)
    row = runner.run(bulk.store(execution))
    for part in ("stdout", "return_json"):
        if damage is None:
            del blobs.objects[row.kept[part]]
        else:
            blobs.objects[row.kept[part]] = damage

    got = runner.run(bulk.fetch(row))

    assert shortened(got) == list(got.kept) == ["stdout", "return_json"]
    assert got.outcome is not None
    assert got.outcome.stdout == LARGE[:HEAD]
    assert got.outcome.stderr == LARGE
    assert got.outcome.return_json is None


def test_an_incomplete_request_is_never_returned(
    bulk: Offload, blobs: MemoryBlobs, runner: asyncio.Runner
) -> None:
    row = runner.run(bulk.store(make.make_execution(request=Request(code="x" * 5000))))
    blobs.objects.clear()

    with pytest.raises(PermanentError, match=row.id) as caught:
        runner.run(bulk.request_of(row))

    assert caught.value.code == "request_lost"
    assert shortened(runner.run(bulk.fetch(row))) == ["request"]


def test_an_unavailable_store_is_reported(
    bulk: Offload, blobs: MemoryBlobs, runner: asyncio.Runner
) -> None:
    execution = make.completed(make.make_execution(), stdout=LARGE)
    row = runner.run(bulk.store(execution))
    blobs.away = True

    for call in (bulk.store(execution), bulk.fetch(row)):
        with pytest.raises(TemporaryError) as caught:
            runner.run(call)
        assert caught.value.code == "blobs_unavailable"


def test_only_truncated_fields_count_as_shortened(bulk: Offload, runner: asyncio.Runner) -> None:
    request = Request(code="pass", stdin="x" * 5000)
    execution = make.completed(make.make_execution(request=request), stdout=LARGE)

    row = runner.run(bulk.store(execution))

    assert set(row.kept) == {"request", "stdout"}
    assert shortened(row) == ["stdout"]
    assert shortened(replace(execution, kept=row.kept)) == []
    assert shortened(execution) == []


def test_the_first_words_of_a_long_command_remain(bulk: Offload, runner: asyncio.Runner) -> None:
    command = ("sh", "-c", "y" * 5000, "never seen")

    row = runner.run(bulk.store(make.make_execution(request=Request(command=command))))

    assert row.request.command == ("sh", "-c", "y" * (HEAD - 6))
    assert shortened(row) == ["request"]
