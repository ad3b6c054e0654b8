"""Runs over a link, for tests without a service that would count the output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.link.output import Intake, RunLimits

if TYPE_CHECKING:
    from atoll.link.client import Link, RunListener
    from atoll.link.messages import RunResult


async def run_over(link: Link, request: dict[str, Any], listener: RunListener) -> RunResult:
    limits = RunLimits(
        output=request["output_limit"],
        value=request["return_limit"],
        results=request.get("results_limit", 0),
        artifacts=request["artifact_limit"],
        terminal=request.get("terminal") is not None,
    )
    return await link.run(request, listener, Intake(limits, requested=True))
