"""
Compares the guarantees with the recorded responses and the runs.

`received` holds what clients received, `record` the final state on the server, and `runs` the
tokens that the code left. A violation contains the job that it concerns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from atoll.model.execution import ExecutionStatus, may_become
from tests import drivers
from tests.e2e.chaos import code
from tests.e2e.chaos.code import Run
from tests.e2e.chaos.history import Done, History, Received, ReceivedEvent
from tests.e2e.chaos.plan import LOSES_INSTANCE, Finish, Job, Kind, Naming, Plan, Style

RETRIES = 3
RETRIED_CAUSES = frozenset({"instance_lost", "node_lost", "evicted"})
RESULT_FIELDS = ("stdout", "stderr", "exit_code", "return_value", "cause", "signal", "error")
DISTURBING = {Kind.STOP_EXECUTOR, Kind.KILL_ZYGOTE}
"""Faults during which no result is written."""
if drivers.CHOSEN == "kubernetes":
    # Or during which no server has received it from the memory of an executor.
    DISTURBING |= {*Kind} - LOSES_INSTANCE | {Kind.KILL_BOTH, Kind.KILL_MACHINE}
UNNOTICED = 15_000_000_000
"""Nanoseconds in which a result may wait for a server while its machine is lost."""
SETTLED = 3_000_000_000
"""Nanoseconds in which the result of code that has ended is made and written down."""


@dataclass(frozen=True)
class Violation:
    text: str
    job: int | None = None


@dataclass(frozen=True)
class Case:
    """All that is known of one execution."""

    job: Job
    received: Received
    record: dict[str, Any]
    runs: list[Run]
    """In order."""
    losses: list[Done]
    """Ends of instances of its session since it was submitted."""
    faults: list[Done]
    """All that happened to its session or to a server since then."""
    gone: set[str]
    """The instances that were ended, ever."""
    kept: list[Run]
    """Of the runs, what is in the workspace."""

    @property
    def status(self) -> ExecutionStatus:
        return ExecutionStatus(self.record["status"])


Check = Callable[[Case], Iterator[str]]


def check(
    plan: Plan,
    history: History,
    records: list[dict[str, Any]],
    tokens: list[str],
    files: list[str],
) -> list[Violation]:
    """`tokens` of all that ran, and those that the workspaces contain, by session."""
    found = [Violation(text) for text in history.odd]
    ran = [run for content in tokens for run in code.runs(content)]
    runs: dict[str, list[Run]] = defaultdict(list)
    for run in ran:
        runs[run.execution_id].append(run)
    kept: dict[str, list[Run]] = defaultdict(list)
    for content in files:
        for run in code.runs(content):
            kept[run.execution_id].append(run)
    by_id = {record["id"]: record for record in records}
    jobs = {job.number: job for job in plan.jobs}
    found += [
        Violation(f"{run.execution_id} ran and has no record", run.job)
        for run in ran
        if run.execution_id not in by_id
    ]
    gone = {
        fault.instance_id
        for fault in history.faults
        if fault.instance_id is not None and fault.kind in LOSES_INSTANCE
    }
    executions: dict[int, set[str]] = defaultdict(set)
    for record in records:
        executions[_job_of(record)].add(record["id"])
    for number, job in jobs.items():
        received = history.jobs[number]
        found += [Violation(text, number) for text in received.odd]
        found += [
            Violation(text, number) for text in _submits(job, received, executions[number], by_id)
        ]
    for record in records:
        job = jobs[_job_of(record)]
        received = history.jobs[job.number]
        faults = [
            fault
            for fault in history.faults
            if fault.session in (None, job.session) and fault.ended >= received.submitted_at
        ]
        losses = [fault for fault in faults if fault.session is not None]
        losses = [fault for fault in losses if fault.kind in LOSES_INSTANCE]
        case = Case(
            job, received, record, runs[record["id"]], losses, faults, gone, kept[record["id"]]
        )
        for one in CHECKS:
            found += [Violation(f"{record['id']}: {text}", job.number) for text in one(case)]
    for session, content in enumerate(tokens):
        found += _overlaps(code.runs(content), plan.capacities[session])
    return found


def _job_of(record: dict[str, Any]) -> int:
    """The code names its job."""
    return int(record["code"].partition('line = "')[2].partition(" ")[0])


def _submits(
    job: Job, received: Received, executions: set[str], by_id: dict[str, dict[str, Any]]
) -> Iterator[str]:
    for execution_id in received.accepted - set(by_id):
        yield f"{execution_id} was accepted and has no record"
    if len(executions) > 1:
        yield f"it became {len(executions)} executions: {sorted(executions)}"
    if job.naming is Naming.ID and executions - {f"job-{job.number}"}:
        yield f"its id is not the one that was asked for: {sorted(executions)}"


# Of each execution


def reaches_a_final_status(case: Case) -> Iterator[str]:
    if not case.status.ended:
        yield f"it is {case.status} still"


def has_a_correct_result(case: Case) -> Iterator[str]:
    """A result is that of a run which took place, and what that run did."""
    job, record, runs = case.job, case.record, case.runs
    if case.status is ExecutionStatus.COMPLETED:
        if job.finish is not Finish.RETURN:
            yield "it completed, and cannot have"
        if not runs or not runs[-1].ended:
            yield "it completed, and did not run to its end"
            return
        last = runs[-1]
        if record["stdout"] != last.stdout(job):
            yield f"its output {record['stdout']!r} is not that of its last run {last.nonce}"
        value = [last.nonce] if job.style is Style.HANDLER else None
        if record["return_value"] != value:
            yield f"it returned {record['return_value']} and not {value}"
    elif case.status is ExecutionStatus.FAILED:
        yield from _failed_rightly(case)
    elif case.status is ExecutionStatus.TIMEOUT:
        if job.finish is not Finish.HANG:
            yield "it timed out, and had time enough"
    elif case.status is ExecutionStatus.CRASHED:
        given_up = record["retry_count"] >= RETRIES and record["cause"] in RETRIED_CAUSES
        if not given_up and not case.received.cancel_sent:
            yield (
                f"it crashed ({record['cause']}, {record['error']}) "
                f"after {record['retry_count']} retries"
            )
    elif case.status is ExecutionStatus.CANCELLED and not case.received.cancel_sent:
        yield "it was cancelled, and nobody asked for that"


def _failed_rightly(case: Case) -> Iterator[str]:
    record, finish = case.record, case.job.finish
    if record["signal"] == "SIGKILL":
        if not any(fault.kind is Kind.KILL_ZYGOTE for fault in case.faults):
            yield "it was killed, and no zygote was"
        return
    name = (record["error"] or {}).get("name")
    as_planned = (finish is Finish.RAISE and name == "ValueError") or (
        finish is Finish.EXIT and record["exit_code"] == code.EXIT_CODE
    )
    if not as_planned:
        yield f"it failed as it should not: {record['cause']}, {record['error']}"
    elif not case.runs or not case.runs[-1].ended:
        yield "it failed by itself, and did not run to its end"


def keeps_the_files_of_a_finished_run(case: Case) -> Iterator[str]:
    if case.status is not ExecutionStatus.COMPLETED or not case.runs:
        return
    last = case.runs[-1]
    # That a machine is lost is noticed after its result was stored, with a warning.
    excused = any(
        fault.kind is Kind.KILL_MACHINE and last.last <= fault.began <= last.last + UNNOTICED
        for fault in case.losses
    )
    if last not in case.kept and not excused:
        yield "it completed, and what it wrote is not in the workspace"


def runs_as_often_as_allowed(case: Case) -> Iterator[str]:
    """A job runs once, and once more for each instance that the record reports as lost."""
    times, retries = len(case.runs), case.record["retry_count"]
    if times > 1 + retries:
        yield f"it ran {times} times, with {retries} retries"
    if times > 1 + len(case.losses):
        yield f"it ran {times} times, and {len(case.losses)} instances were lost"
    for before, after in pairwise(case.runs):
        if not any(
            before.began <= loss.ended and loss.began <= after.began for loss in case.losses
        ):
            yield f"it ran again ({after.nonce}) while its instance lived"


def is_retried_for_losses_only(case: Case) -> Iterator[str]:
    retries, attempts = case.record["retry_count"], case.record["attempts"]
    if retries > RETRIES:
        yield f"it was retried {retries} times"
    for attempt in attempts[:retries]:
        if attempt["cause"] not in RETRIED_CAUSES:
            yield f"it was retried after {attempt['cause']}"
    # A run that had not started is excused while its instance is unreachable because of a fault or
    # a slow machine.
    stood = any(fault.kind is Kind.STOP_EXECUTOR for fault in case.faults)
    kept = [attempt for attempt in attempts[:retries] if attempt["container_id"] not in case.gone]
    if len(kept) > max(0, 1 + retries - len(case.runs)) and not stood:
        yield f"it was retried, and its instance was not lost: {kept}"


def is_not_run_after_its_result_exists(case: Case) -> Iterator[str]:
    """
    A result survives its instance, even if no server was running to receive it. On a cluster it is
    in the memory of an executor until a server has it.
    """
    for before, after in pairwise(case.runs):
        if not before.ended:
            continue
        first = min(
            (loss.began for loss in case.losses if before.last <= loss.ended <= after.began),
            default=after.began,
        )
        # The process that writes the result was not running, or nothing could receive it.
        disturbed = any(
            fault.kind in DISTURBING
            and fault.began <= first
            and fault.ended >= before.last - SETTLED
            for fault in case.faults
        )
        if first - before.last > SETTLED and not disturbed:
            yield f"it was run again ({after.nonce}) long after it had ended ({before.nonce})"


def stays_cancelled(case: Case) -> Iterator[str]:
    at = case.received.cancelled_at
    if at is None:
        return
    if case.status is not ExecutionStatus.CANCELLED:
        yield f"it was said to be cancelled and is {case.status}"
    for run in case.runs:
        if run.last > at:
            yield f"run {run.nonce} went on after it was said to be cancelled"


def reports_one_result(case: Case) -> Iterator[str]:
    for result in case.received.results:
        for name in RESULT_FIELDS:
            if name in result and name in case.record and result[name] != case.record[name]:
                yield f"{name} was reported as {result[name]!r} and is {case.record[name]!r}"


def changes_status_as_allowed(case: Case) -> Iterator[str]:
    statuses = [ExecutionStatus(status) for status in case.received.statuses]
    for before, after in pairwise([*statuses, case.status]):
        if not may_become(before, after):
            yield f"it was {before} and then {after}"


def is_streamed_completely_and_once(case: Case) -> Iterator[str]:
    """Despite disconnects, a reader receives each event once and the complete last attempt."""
    numbered = [event for event in case.received.events if event.number is not None]
    numbers = [event.number for event in numbered if event.number is not None]
    for before, after in pairwise(numbers):
        if after <= before:
            yield f"event {after} was received after {before}"
    if not case.received.read_to_end or case.status is ExecutionStatus.CRASHED:
        return
    attempt = case.record["retry_count"]
    for name in ("stdout", "stderr"):
        text = "".join(_text(event) for event in numbered if _is_of(event, name, attempt))
        if text != case.record[name]:
            yield f"{name} was received as {text!r} and is {case.record[name]!r}"


def _is_of(event: ReceivedEvent, name: str, attempt: int) -> bool:
    return event.name == name and event.number is not None and event.number >> 32 == attempt


def _text(event: ReceivedEvent) -> str:
    return str(event.content["text"])


CHECKS: tuple[Check, ...] = (
    reaches_a_final_status,
    has_a_correct_result,
    keeps_the_files_of_a_finished_run,
    runs_as_often_as_allowed,
    is_retried_for_losses_only,
    is_not_run_after_its_result_exists,
    stays_cancelled,
    reports_one_result,
    changes_status_as_allowed,
    is_streamed_completely_and_once,
)


# Of a session


def _overlaps(runs: list[Run], capacity: int) -> Iterator[Violation]:
    """The number of concurrent runs never exceeds the capacity of the session."""
    for run in runs:
        others = [one for one in runs if one is not run and one.began <= run.began < one.last]
        if len(others) >= capacity:
            names = ", ".join(f"{one.execution_id} ({one.nonce})" for one in others)
            yield Violation(f"run {run.nonce} began while {names} ran", run.job)
