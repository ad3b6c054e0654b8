"""The link against executors that a hostile image brings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.link import credit, messages, output, transport, validation
from atoll.link.client import Link
from atoll.link.errors import LinkLost, LinkSaturated, ProtocolViolation
from atoll.protocol import frames
from atoll.settings import LinkSettings
from tests.executors import job
from tests.fuzz.hostile import (
    ANSWERS,
    EVENTS,
    HELLO,
    OWN,
    RESULT,
    SCANNED,
    Said,
    hellos,
    say,
    scripts,
)
from tests.fuzz.hostile import output as piece
from tests.fuzz.links import RunOutput, linked, play, request
from tests.runs import run_over

pytestmark = pytest.mark.anyio

CHUNK = b"x" * frames.CHUNK
END = say(frames.END, RESULT)
STARTED = say(frames.EVENT, {"event": "started"})
BEAT = say(frames.EVENT, {"event": "heartbeat"})


def result(**changed: Any) -> list[Said]:
    return [STARTED, say(frames.END, {**RESULT, **changed})]


def raw(kind: int, text: str) -> Said:
    return Said(OWN, kind, text.encode())


def with_duration(text: str) -> list[Said]:
    made = json.dumps({**RESULT, "duration": "?"}).replace('"?"', text)
    return [raw(frames.END, made)]


ARTIFACT = RESULT["artifacts"][0]
RUNS: dict[str, list[Said]] = {
    "output beyond its limit": [piece(CHUNK, 1), piece(CHUNK, 2)],
    "output of a channel that is none": [piece(b"x", 1, 9)],
    "output out of order": [piece(b"x", 2), piece(b"x", 2)],
    "output of nothing": [piece(b"")],
    "output in very many pieces": [piece(b"x", n, 5) for n in range(1, 300)],
    "an event of a megabyte": [say(frames.EVENT, {"event": "x" * 2**20})],
    "an event that is long": [say(frames.EVENT, {"event": "x" * 2000})],
    "events without end": [BEAT] * (credit.EVENT_BURST + 500),
    "a result of two megabytes": [say(frames.END, {**RESULT, "more": "x" * 2**21})],
    "a result of very many values": [raw(frames.END, '{"a":[%s1]}' % ("[]," * 200_000))],
    "a very long number": [raw(frames.END, '{"a":%s}' % ("1" * 20_000))],
    "very many artifacts": result(artifacts=[ARTIFACT] * 11),
    "300,000 artifacts": result(artifacts=[{"path": "a"}] * 300_000),
    "artifacts that are none": result(artifacts={"a": 1}),
    "an artifact below nothing": result(artifacts=[{**ARTIFACT, "size": -1}]),
    "an artifact with a name that is none": result(artifacts=[{**ARTIFACT, "path": "\ud800"}]),
    "an artifact with a NUL": result(artifacts=[{**ARTIFACT, "path": "a\0"}]),
    "a duration that is text": result(duration="nan"),
    "a duration that is no number": with_duration("NaN"),
    "an infinite duration": with_duration("Infinity"),
    "a duration that no float holds": with_duration("1e400"),
    "a duration below nothing": result(duration=-1),
    "a duration of ages": result(duration=1e300),
    "an integer that no float holds": result(duration=10**400),
    "processor time that is no number": result(usage={"cpu": float("nan")}),
    "an exit code of no process": result(exit_code=256),
    "an exit code that is true": result(exit_code=True),
    "a signal that is none": result(exit_code=None, signal=2**40),
    "neither exit code nor signal": result(exit_code=None),
    "a reason that is none": result(reason="because"),
    "a size below nothing": result(sizes={"1": -1}),
    "an error that is text": result(error="bad"),
    "no result": [say(frames.END, {})],
    "a list for a result": [raw(frames.END, "[1]")],
    "no JSON": [raw(frames.END, "what")],
    "JSON that is very deep": [raw(frames.END, "[" * 10_000)],
    "a kind that is not known": [Said(OWN, 99, b"")],
    "a request": [say(frames.OPEN, {"op": "run"})],
    "a second hello": [say(frames.HELLO, HELLO, 0)],
    "a hello on a stream": [say(frames.HELLO, HELLO)],
    "a frame of a stream that was never opened": [Said(77, frames.END, b"{}")],
    "data of no file": [Said(OWN, frames.DATA, b"x")],
    "credit for nothing": [Said(OWN, frames.CREDIT, b"\0\0\0\1")],
    "credit that is no number": [Said(OWN, frames.CREDIT, b"\0")],
    "a refusal without a code": [say(frames.ERROR, {"message": "no"})],
    "a refusal with a code that is none": [say(frames.ERROR, {"code": "A b", "message": "no"})],
    "a zygote that is text": [say(frames.EVENT, {"event": "zygote", "pid": "1"}, 0)],
    "a frame of four gigabytes": [Said(OWN, frames.END, b"{}", 2**32 - 1)],
}
OTHERS: dict[str, tuple[str, list[Said]]] = {
    "a list that is none": ("list", [say(frames.END, {"entries": 5, "next": None})]),
    "an entry of another type": ("stat", [say(frames.END, {"entry": {"path": 1}})]),
    "an event that was not asked for": ("stat", [STARTED]),
    "a context of another state": ("context_list", [say(frames.END, {"contexts": [{}]})]),
    "a process that is none": ("processes", [say(frames.END, {"processes": [[1]]})]),
    "a match that is none": ("search", [say(frames.END, {"matches": [1], "next": None})]),
    "a range beyond the file": (
        "read",
        [say(frames.EVENT, {"entry": {**ANSWERS["stat"]["entry"], "stop": 6}})],
    ),
    "more of a file than announced": (
        "read",
        [
            say(frames.EVENT, {"entry": ANSWERS["stat"]["entry"]}),
            Said(OWN, frames.DATA, b"123456"),
        ],
    ),
    "data of nothing": ("scan", [Said(OWN, frames.DATA, b"")]),
    "an entry of a scan that is none": (
        "collect",
        [say(frames.EVENT, {"event": "file", "index": 0, "entry": ["../a", *SCANNED[1:]]})],
    ),
    "more credit than was sent": (
        "unpack",
        [Said(OWN, frames.CREDIT, b"\xff\xff\xff\xff")],
    ),
}


@pytest.fixture(autouse=True)
def _fewer_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_ENTRIES", 200)


@pytest.mark.parametrize("script", RUNS.values(), ids=RUNS.keys())
async def test_a_run_of_a_hostile_executor_ends_with_the_violation(script: list[Said]) -> None:
    received = RunOutput()
    async with asyncio.timeout(20), linked(lambda _: script, stays=True) as link:
        with pytest.raises(ProtocolViolation):
            await request(link, "run", received)
        assert link.violation is not None
        assert not link.alive


@pytest.mark.parametrize(("op", "script"), OTHERS.values(), ids=OTHERS.keys())
async def test_any_other_request_ends_with_the_violation_too(op: str, script: list[Said]) -> None:
    async with asyncio.timeout(20), linked(lambda _: script, stays=True) as link:
        with pytest.raises(ProtocolViolation):
            await request(link, op, RunOutput())
        assert link.violation is not None


async def test_all_requests_in_progress_end_with_the_violation() -> None:
    def script(op: str) -> list[Said]:
        return [Said(77, frames.END, b"{}")] if op == "stat" else [STARTED]

    async with linked(script, stays=True) as link:
        running = asyncio.create_task(request(link, "run", RunOutput()))
        await asyncio.sleep(0)
        with pytest.raises(ProtocolViolation):
            await request(link, "stat", RunOutput())
        with pytest.raises(ProtocolViolation):
            await running


@pytest.mark.parametrize("op", sorted(ANSWERS))
async def test_an_honest_reply_is_accepted(op: str) -> None:
    frames_sent = [say(frames.EVENT, event) for event in EVENTS.get(op, [])]
    async with linked(lambda _: [*frames_sent, say(frames.END, ANSWERS[op])]) as link:
        await request(link, op, RunOutput())
        assert link.violation is None


async def test_a_result_needs_no_start_and_later_messages_are_dropped() -> None:
    async with linked(lambda _: [END, END, STARTED], stays=True) as link:
        assert (await request(link, "run", RunOutput()))["exit_code"] == 0
        assert (await request(link, "run", RunOutput()))["exit_code"] == 0
        assert link.violation is None


async def test_a_result_sent_repeatedly_is_a_violation() -> None:
    count = credit.LATE_ROOM // len(END.payload) + 2
    async with linked(lambda _: [END] * count, stays=True) as link:
        assert (await request(link, "run", RunOutput()))["exit_code"] == 0
        await asyncio.wait_for(asyncio.shield(link.closed), 20)
        assert link.violation is not None


async def test_a_reported_size_counts_only_where_output_was_dropped() -> None:
    def script(op: str) -> list[Said]:
        return [piece(b"ab"), say(frames.END, {**RESULT, "sizes": {"1": 419430400, "2": 7}})]

    async with linked(script) as link:
        response = await request(link, "run", RunOutput())
    assert response["sizes"] == {"1": 2, "2": 0}


async def test_output_beyond_the_limits_of_an_earlier_run_is_dropped() -> None:
    limits = output.RunLimits(output=10, value=10, results=10, artifacts=1)
    intake = output.Intake(limits, requested=False)
    received = RunOutput()
    many = {**RESULT, "artifacts": [ARTIFACT] * 3, "sizes": {"1": 16}}
    script = [piece(b"x" * 8), piece(b"x" * 8, 2), say(frames.END, many)]
    async with linked(lambda _: script) as link:
        reported = await link.attach("exec_1", 0, received, intake)
    assert (received.sizes, reported["sizes"]) == ({1: 10}, {"1": 16})
    assert (len(reported["artifacts"]), reported["artifacts_cut"]) == (1, True)


async def test_unread_events_of_files_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(credit, "MAX_WAITING", 100_000)
    hole = say(frames.EVENT, {"event": "hole", "length": 1})
    async with linked(lambda _: [hole] * 1000, stays=True) as link:
        files = link.pull("collect", paths=["a"])
        assert (await anext(files)) == {"event": "hole", "length": 1}
        await asyncio.wait_for(asyncio.shield(link.closed), 20)
        assert link.violation is not None


async def test_a_missing_hello_times_out(tmp_path: Path) -> None:
    over = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        over.set()

    path = tmp_path / "link.sock"
    server = await asyncio.start_unix_server(mute, path)
    with pytest.raises(LinkLost, match="did not answer"):
        await Link.connect(str(path), LinkSettings(), timeout=timedelta(seconds=0.2))
    server.close()
    await over.wait()


async def test_a_zygote_replaced_before_the_hello_is_not_a_violation(tmp_path: Path) -> None:
    """An executor reports it on every connection, also before the hello."""

    async def replace(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.encode_json(0, frames.EVENT, {"event": "zygote", "pid": 9}))
        writer.write(frames.encode_json(0, frames.HELLO, HELLO))
        await reader.read()
        writer.close()

    path = tmp_path / "link.sock"
    server = await asyncio.start_unix_server(replace, path)
    link = await Link.connect(str(path), LinkSettings(), timeout=timedelta(seconds=20))
    assert link.hello["zygote"] == HELLO["zygote"]
    link.close()
    await link.closed
    server.close()


@asynccontextmanager
async def deaf(place: Path) -> AsyncIterator[Link]:
    """To an executor that reads nothing after the hello."""
    writers: list[asyncio.StreamWriter] = []

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.read(1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(frames.encode_json(0, frames.HELLO, HELLO))

    path = str(place / "link.sock")
    server = await asyncio.start_unix_server(greet, path)
    patience = LinkSettings(read_timeout=timedelta(seconds=0.1))
    try:
        yield await Link.connect(path, patience, timeout=timedelta(seconds=20))
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


async def test_no_upload_waits_forever_for_an_executor_that_does_not_read(tmp_path: Path) -> None:
    async with asyncio.timeout(20), deaf(tmp_path) as link:
        ended = await asyncio.gather(
            *(request(link, "write", RunOutput()) for _ in range(4)), return_exceptions=True
        )
        assert [type(error) for error in ended] == [LinkLost] * 4
        link.close()


async def test_the_queue_for_an_executor_that_does_not_read_is_bounded(tmp_path: Path) -> None:
    size = 4 * 1024 * 1024
    async with asyncio.timeout(20), deaf(tmp_path) as link:
        for _ in range(9):
            with pytest.raises(LinkLost):
                await link.call("stat", path="x" * size)
        with pytest.raises(LinkSaturated):
            await link.call("stat", path="x")
        # What ends it is sent all the same.
        with pytest.raises(LinkLost):
            await link.call("cancel", id="exec_1")
        link.close()


async def test_a_link_can_be_closed_while_its_executor_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "CLOSE_TIMEOUT", 0.05)
    async with deaf(tmp_path) as link:
        with pytest.raises(LinkLost):
            await link.call("stat", path="x" * 2**20)
        link.close()
        await asyncio.wait_for(asyncio.shield(link.closed), 20)


HELLOS: dict[str, dict[str, Any]] = {
    "another version": {**HELLO, "version": 2},
    "no version": {**HELLO, "version": None},
    "runs that are none": {**HELLO, "runs": {"id": "a"}},
    "a run without an id": {**HELLO, "runs": [{"ended": True}]},
    "very many runs": {**HELLO, "runs": [{"id": "a", "ended": True}] * 12_000},
    "very many features": {**HELLO, "features": ["a"] * 65},
    "a zygote that is text": {**HELLO, "zygote": "2"},
}


@pytest.mark.parametrize("greeting", HELLOS.values(), ids=HELLOS.keys())
async def test_an_invalid_hello_is_a_violation(greeting: dict[str, Any]) -> None:
    with pytest.raises(ProtocolViolation):
        async with linked(lambda _: [], say(frames.HELLO, greeting, 0)):
            pass


@pytest.mark.parametrize("channel", [frames.STDOUT, frames.VALUE, frames.DISPLAY])
async def test_at_most_the_limit_of_400_megabytes_of_output_is_accepted(channel: int) -> None:
    many = [piece(CHUNK, number, channel) for number in range(1, 6400)]
    received = RunOutput()
    async with asyncio.timeout(20), linked(lambda _: many, stays=True) as link:
        with pytest.raises(ProtocolViolation):
            await run_over(link, job("exec_1", "1"), received)
    assert received.sizes[channel] <= 2**20 + output.LINES_MARGIN


async def test_unread_data_is_not_sent_without_credit() -> None:
    data = Said(OWN, frames.DATA, CHUNK)
    pieces = [piece(CHUNK, number) for number in range(1, 10)]
    async with linked(lambda op: pieces if op == "attach" else [data] * 9, stays=True) as link:
        files = link.pull("scan")
        await anext(files)
        await asyncio.wait_for(asyncio.shield(link.closed), 20)
        assert link.violation is not None
    async with linked(lambda _: pieces, stays=True) as link:
        watching = link.watch("exec_1", 0)
        await anext(watching)
        await asyncio.wait_for(asyncio.shield(link.closed), 20)
        assert link.violation is not None


async def test_large_messages_are_refused_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    many = b'{"a":[' + b"[]," * 100_000 + b"1]}"
    with pytest.raises(ProtocolViolation):
        validation.decoded(many)
    # Marks within a string are no values.
    monkeypatch.undo()
    text = json.dumps({"text": ",[{:" * 30_000}).encode()
    assert validation.decoded(text)["text"][:4] == ",[{:"


def test_only_well_formed_questions_are_accepted() -> None:
    asked = {"id": "1", "state": "asked", "question": "Go on?", "data": None, "timeout": 300.0}
    assert messages.approval({**asked, "more": 1}) == asked
    wrong: list[dict[str, Any]] = [
        {"timeout": "x"}, {"timeout": []}, {"id": 1}, {"state": 5}, {"question": {}},
    ]  # fmt: skip
    for changed in wrong:
        assert messages.approval({**asked, **changed}) is None
    answered = {"id": "1", "state": "answered", "approved": True, "answer": [1], "reason": None}
    assert messages.approval(answered) == answered
    assert messages.approval({**answered, "approved": "yes"}) is None


@settings(max_examples=120)
@given(st.sampled_from(sorted(ANSWERS)).flatmap(lambda op: st.tuples(st.just(op), scripts(op))))
def test_a_request_ends_whatever_an_executor_sends(said: tuple[str, list[Said]]) -> None:
    asyncio.run(play(*said))


@settings(max_examples=30)
@given(hellos)
def test_a_connection_ends_whatever_the_hello_contains(greeting: Said) -> None:
    asyncio.run(play("stat", [say(frames.END, ANSWERS["stat"])], greeting))
