"""Carries out one plan and reports violations."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import httpx

from tests import drivers
from tests.e2e.api import V1, answer
from tests.e2e.chaos import checker, code, plan
from tests.e2e.chaos.checker import Violation
from tests.e2e.chaos.clients import Client
from tests.e2e.chaos.cluster_world import ClusterWorld
from tests.e2e.chaos.history import History
from tests.e2e.chaos.world import World


def torment(place: Path, seed: int, seconds: float, *, size: int = 1) -> str:
    """Raises with the story of what went wrong, if anything did; what took place, in a line."""
    planned = plan.make(seed, seconds, members=size)
    history = History()
    kind = World if drivers.cluster is None else ClusterWorld
    with kind(place, planned, history, size=size) as world:
        world.make_sessions()
        asyncio.run(_carry_out(planned, world, history))
        records = _records(world)
        files = world.files()
        tokens = world.tokens(files)
        found = checker.check(planned, history, records, tokens, files)
        found += [Violation(text) for text in world.complaints()]
        assert not found, _story(planned, history, records, tokens, found)
        world.check_instances()
    return _summary(planned, history, records, tokens)


async def _carry_out(planned: plan.Plan, world: World, history: History) -> None:
    history.start = time.monotonic_ns()
    world.start_clock()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    timeout = httpx.Timeout(15, connect=5)
    async with (
        httpx.AsyncClient(limits=limits, timeout=timeout) as http,
        asyncio.TaskGroup() as tasks,
    ):
        suffering = tasks.create_task(world.suffer(planned))
        clients = [
            tasks.create_task(Client(job, world, history, http).work(), name=f"{job.number}")
            for job in planned.jobs
        ]
        await suffering
        history.note("-- the last fault")
        await world.until(planned.seconds)
        _, late = await asyncio.wait(clients, timeout=world.recovery)
        for task in late:
            number = int(task.get_name())
            history.jobs[number].odd.append(f"its client waits still after {world.recovery} s")
            task.cancel()


def _records(world: World) -> list[dict[str, Any]]:
    """All records, once executions without a waiting client have ended."""
    with contextlib.suppress(AssertionError):
        world.wait_until_settled(world.recovery)
    api = world[0].api
    rows = world.rows("SELECT id FROM executions ORDER BY id")
    return [answer(api.http.get(f"{V1}/executions/{row['id']}")) for row in rows]


def _summary(
    planned: plan.Plan, history: History, records: list[dict[str, Any]], tokens: list[str]
) -> str:
    ran = sum(len(code.runs(content)) for content in tokens)
    retries = sum(record["retry_count"] for record in records)
    return (
        f"seed {planned.seed}: {len(planned.jobs)} jobs, {len(records)} executions, {ran} runs, "
        f"{retries} retries, {len(history.faults)} faults"
    )


def _story(
    planned: plan.Plan,
    history: History,
    records: list[dict[str, Any]],
    tokens: list[str],
    found: list[Violation],
) -> str:
    """Everything about the jobs that something is wrong with, in order."""
    received = [f"seed {planned.seed}, {planned.seconds:g} s: {len(found)} violations"]
    received += [f"  {'' if one.job is None else f'job {one.job}: '}{one.text}" for one in found]
    concerned = sorted({one.job for one in found if one.job is not None})
    for number in concerned:
        received += ["", str(planned.jobs[number])]
        for record in records:
            if f'line = "{number} ' in record["code"]:
                shown = {name: value for name, value in record.items() if name != "code"}
                received.append(str(shown))
    happened: list[tuple[int, str]] = []
    for at, text in history.lines():
        if text.startswith("--") or any(text.startswith(f"job {one}:") for one in concerned):
            happened.append((at, text))
    for content in tokens:
        for run in code.runs(content):
            if run.job in concerned:
                words = [token for token in run.tokens if token[0] != "tick"] + run.tokens[-1:]
                happened += [
                    (at, f"job {run.job}: [{run.execution_id} {run.nonce} {word}]")
                    for word, at in dict.fromkeys(words)
                ]
    received += ["", *(f"{history.when(at)} {text}" for at, text in sorted(happened))]
    return "\n".join(received)
