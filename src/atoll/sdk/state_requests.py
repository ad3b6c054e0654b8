"""What is asked of a session besides running code in it: to be other than it is, or to change."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from atoll.errors import TemporaryError
from atoll.sdk.arguments import check_limits, check_numbers, check_string_dict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.sdk.http_client import HttpClient

_ONE_WAIT = 60.0
"""Seconds that one request waits; what takes longer is asked for again."""
_IN_LINE = "archive_busy"
"""Others come first: what was asked for is written down, and is done in its turn."""

_THERE = {
    "start": ("running",),
    "resume": ("running",),
    "pause": ("paused",),
    # One that is archived is left so.
    "stop": ("stopped", "archived"),
    "archive": ("archived",),
}


async def request_state(http: HttpClient, path: str, verb: str, wait: float | None) -> Any:
    """
    The session when it is so, or as it is after `wait` seconds; or when somebody else has come to
    want something else of it.
    """
    loop = asyncio.get_running_loop()
    until = None if wait is None else loop.time() + max(0.0, wait)
    wanted = None
    while True:
        left = _ONE_WAIT if until is None else min(_ONE_WAIT, max(0.0, until - loop.time()))
        try:
            answer = await http.call(
                "POST", f"{path}/{verb}", query={"wait": f"{left:g}"}, wait=left, once=True
            )
        except TemporaryError as error:
            if error.code != _IN_LINE:
                raise
            pause = error.retry_after
            if until is not None:
                pause = min(pause, max(0.0, until - loop.time()))
            await asyncio.sleep(pause)
            answer = await http.call("GET", path)
        wanted = wanted or answer["wanted"]
        over = until is not None and loop.time() >= until
        if over or answer["status"] in _THERE[verb] or answer["wanted"] != wanted:
            return answer


def change_body(
    *,
    timeout: int | None,
    cpu: str | float | None,
    memory: str | int | None,
    disk: str | int | None,
    max_processes: int | None,
    env: Mapping[str, str | None] | None,
    labels: Mapping[str, str | None] | None,
    auto_start: bool | None,
    idle_timeout: int | None,
    archive_after: int | None,
    delete_after: int | None,
) -> dict[str, Any]:
    """What of a session is to be other than it is."""
    check_numbers(
        timeout=timeout,
        idle_timeout=idle_timeout,
        archive_after=archive_after,
        delete_after=delete_after,
    )
    check_limits(cpu=cpu, memory=memory, disk=disk, max_processes=max_processes)
    check_string_dict(env=env, labels=labels, removable=True)
    body = {
        "timeout": timeout,
        "cpu": None if cpu is None else str(cpu),
        "memory": None if memory is None else str(memory),
        "disk": None if disk is None else str(disk),
        "max_processes": max_processes,
        "env_vars": dict(env) if env else None,
        "labels": dict(labels) if labels else None,
        "auto_start": auto_start,
        "idle_timeout": idle_timeout,
        "archive_after": archive_after,
        "delete_after": delete_after,
    }
    return {name: value for name, value in body.items() if value is not None}
