"""
Clients: one for each job, which submits it, follows it and records the responses.

A request with an id or a key is repeated until it gets a response. Any other is sent once, and its
outcome is unknown when the response is lost.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tests.e2e.api import V1
from tests.e2e.chaos import code
from tests.e2e.chaos.history import History, Received, ReceivedEvent
from tests.e2e.chaos.plan import Door, Follow, Job, Naming
from tests.e2e.chaos.world import World

ENDS = frozenset({"completed", "failed", "timeout", "crashed", "cancelled"})
AGAIN = frozenset({409, 429, 503})
AGAIN_CODES = frozenset(
    {
        "idempotency_in_flight", "session_busy", "session_not_ready", "coordination_unavailable",
        "database_unavailable", "lease_lost", "shutting_down", "link_lost",
    }
)  # fmt: skip
"""Of answers after which the same may be asked again."""
PAUSE = 0.05
"""Seconds between two questions."""


class Unanswered(Exception):
    """It is unknown whether the request arrived."""


class Client:
    def __init__(self, job: Job, world: World, history: History, http: httpx.AsyncClient) -> None:
        self._job = job
        self._world = world
        self._history = history
        self._received: Received = history.jobs[job.number]
        self._http = http
        self._chance = random.Random(job.number)
        self._session = world.sessions[job.session]
        self._name = f"job-{job.number}"

    async def work(self) -> None:
        job = self._job
        await self._world.until(job.at)
        self._received.submitted_at = time.monotonic_ns()
        sends = [self._submit() for _ in range(1 + job.repeats)]
        await asyncio.gather(*sends)
        if self._received.accepted and job.repeats:
            await self._submit()  # Sent long afterwards: the outcome must be the same.

    # Submitting

    async def _submit(self) -> None:
        method = "POST"
        path, body, headers = self._request()
        while True:
            try:
                if self._job.door is Door.STREAM:
                    await self._submit_stream(path, body)
                    return
                answer = await self._request_until_sent(method, path, json=body, headers=headers)
            except Unanswered:
                self._note("no answer to the submit")
                if self._job.naming is Naming.NOTHING:
                    return
                await asyncio.sleep(PAUSE)
                continue
            if answer.status_code in (200, 202):
                await self._accepted(answer.json())
                return
            self._note(f"submit: {answer.status_code} {answer.text[:300]}")
            if not self._may_retry(answer) or self._job.naming is Naming.NOTHING:
                return
            await asyncio.sleep(PAUSE)

    def _request(self) -> tuple[str, dict[str, Any], dict[str, str]]:
        job = self._job
        body: dict[str, Any] = {"code": code.of(job, self._world.witness)}
        headers: dict[str, str] = {}
        if job.naming is Naming.ID:
            body["execution_id"] = self._name
        elif job.naming is Naming.KEY:
            headers["Idempotency-Key"] = self._name
        if job.door in (Door.EXECUTE, Door.WAIT):
            body["timeout"] = job.timeout
            if job.door is Door.WAIT:
                body["wait"] = 10
            return f"sessions/{self._session}/execute", body, headers
        body["timeout_ms"] = int(job.timeout * 1000)
        body["session_id"] = self._session
        body["mode"] = job.door.value
        return "invocations", body, headers

    async def _accepted(self, answer: dict[str, Any]) -> None:
        """A submit was answered: with a result, or with the promise of one."""
        execution_id = str(answer.get("execution_id"))
        result = answer if "stdout" in answer else answer.get("result")
        self._note(f"accepted as {execution_id}{'' if result is None else ', and has ended'}")
        first = not self._received.accepted
        self._received.accepted.add(execution_id)
        if result is not None:
            self._record_result(result)
        if first:
            await self._follow(execution_id, 0)

    async def _submit_stream(self, path: str, body: dict[str, Any]) -> None:
        breaks = list(self._job.breaks)
        execution_id, last = "", 0
        try:
            async with self._stream("POST", path, json=body) as events:
                async for event in events:
                    if event.name == "accepted":
                        execution_id = str(event.content["execution_id"])
                        if self._received.accepted:
                            # A repeat, whose events another one reads.
                            self._received.accepted.add(execution_id)
                            return
                        self._note(f"accepted as {execution_id}, on a stream")
                        self._received.accepted.add(execution_id)
                        continue
                    last = self._receive(event, last)
                    if event.name == "result":
                        break
                    if breaks and event.number is not None:
                        breaks[0] -= 1
                        if breaks[0] <= 0:
                            breaks.pop(0)
                            break
        except Unanswered:
            if not execution_id:
                raise
        except _Refused as refused:
            self._note(f"submit: {refused.answer.status_code} {refused.answer.text[:300]}")
            if self._may_retry(refused.answer) and self._job.naming is not Naming.NOTHING:
                await asyncio.sleep(PAUSE)
                raise Unanswered from refused
            return
        if execution_id:
            await self._follow(execution_id, last)

    # Following

    async def _follow(self, execution_id: str, last: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._job.cancel_after is not None:
                tasks.create_task(self._cancel(execution_id, self._job.cancel_after))
            if self._received.read_to_end:
                return
            if self._job.follow is Follow.READ or self._job.door is Door.STREAM:
                tasks.create_task(self._read(execution_id, last))
            elif self._job.follow is Follow.WAIT:
                tasks.create_task(self._await_result(execution_id))
            elif self._job.follow is Follow.POLL:
                tasks.create_task(self._poll(execution_id))

    async def _await_result(self, execution_id: str) -> None:
        while True:
            answer = await self._get(f"executions/{execution_id}/result?wait=5")
            if answer.status_code == 200:
                self._record_result(answer.json())
                return
            if _code(answer) != "execution_not_finished" and not self._may_retry(answer):
                return

    async def _poll(self, execution_id: str) -> None:
        ended = 0
        while ended < 3:  # It stays as it ended.
            answer = await self._get(f"executions/{execution_id}/status")
            if answer.status_code == 200:
                status = str(answer.json()["status"])
                if self._received.statuses[-1:] != [status]:
                    self._note(f"is {status}")
                    self._received.statuses.append(status)
                ended += status in ENDS
            elif not self._may_retry(answer):
                return
            await asyncio.sleep(PAUSE)

    async def _cancel(self, execution_id: str, after: float) -> None:
        await asyncio.sleep(after)
        self._received.cancel_sent = True
        while True:
            try:
                answer = await self._request_until_sent(
                    "POST", f"executions/{execution_id}/cancel", json={"reason": "as planned"}
                )
            except Unanswered:
                await asyncio.sleep(PAUSE)
                continue
            self._note(f"cancel: {answer.status_code} {answer.text[:120]}")
            if answer.status_code == 200 and answer.json()["status"] in ENDS:
                if answer.json()["status"] == "cancelled":
                    self._received.cancelled_at = time.monotonic_ns()
                return
            if _code(answer) == "execution_ended":
                return
            if answer.status_code != 200 and not self._may_retry(answer):
                return
            await asyncio.sleep(PAUSE)

    async def _read(self, execution_id: str, last: int) -> None:
        breaks = list(self._job.breaks)
        while not self._received.read_to_end:
            left = breaks.pop(0) if breaks else None
            headers = {"Last-Event-ID": str(last)} if last else {}
            try:
                async with self._stream(
                    "GET", f"executions/{execution_id}/events", headers=headers
                ) as events:
                    async for event in events:
                        last = self._receive(event, last)
                        if event.number is not None and left is not None:
                            left -= 1
                        if event.name == "result" or left == 0:
                            break
            except Unanswered:
                self._note(f"the stream broke after {last}")
            except _Refused as refused:
                if not self._may_retry(refused.answer):
                    return
            await asyncio.sleep(PAUSE)

    def _receive(self, event: ReceivedEvent, last: int) -> int:
        self._received.events.append(event)
        if event.name in ("started", "retry", "result"):
            self._note(f"received {event.name} ({event.number})")
        if event.name == "result":
            self._received.read_to_end = True
            self._record_result(event.content)
        return last if event.number is None else event.number

    def _record_result(self, result: dict[str, Any]) -> None:
        self._note(f"received the result: {result['status']}, {result.get('cause')}")
        self._received.results.append(result)

    # Requests

    async def _get(self, path: str) -> httpx.Response:
        while True:
            try:
                return await self._request_until_sent("GET", path)
            except Unanswered:
                await asyncio.sleep(PAUSE)

    async def _request_until_sent(self, method: str, path: str, **options: Any) -> httpx.Response:
        """An answer; asked again only as long as nothing was sent."""
        while True:
            url, headers = self._address()
            try:
                headers |= options.pop("headers", {})
                answer = await self._http.request(
                    method, f"{url}{V1}/{path}", headers=headers, **options
                )
            except (httpx.ConnectError, httpx.ConnectTimeout):
                await asyncio.sleep(PAUSE)
                options["headers"] = headers
                continue
            except httpx.TransportError as error:
                self._received.sent += method == "POST"
                raise Unanswered from error
            self._received.sent += method == "POST"
            return answer

    def _address(self) -> tuple[str, dict[str, str]]:
        member = self._chance.choice(self._world.members)
        return member.url, {"Authorization": f"Bearer {member.key}"}

    def _stream(self, method: str, path: str, **options: Any) -> _Events:
        url, headers = self._address()
        headers |= options.pop("headers", {})
        return _Events(self._http.stream(method, f"{url}{V1}/{path}", headers=headers, **options))

    def _may_retry(self, answer: httpx.Response) -> bool:
        if answer.status_code in AGAIN and _code(answer) in AGAIN_CODES:
            return True
        self._received.odd.append(
            f"{answer.request.url.path}: {answer.status_code} {answer.text[:300]}"
        )
        return False

    def _note(self, text: str) -> None:
        self._history.note(text, self._job.number)


class _Refused(Exception):
    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(answer.text)
        self.answer = answer


class _Events:
    """Server-sent events of one connection; `Unanswered` when it breaks."""

    def __init__(self, opening: Any) -> None:
        self._opening = opening

    async def __aenter__(self) -> AsyncIterator[ReceivedEvent]:
        try:
            response = await self._opening.__aenter__()
        except httpx.TransportError as error:
            raise Unanswered from error
        if response.status_code != 200:
            try:
                await response.aread()
            except httpx.TransportError as error:
                raise Unanswered from error
            finally:
                await self._opening.__aexit__(None, None, None)
            raise _Refused(response)
        return self._events(response)

    async def __aexit__(self, *error: object) -> None:
        await self._opening.__aexit__(*error)

    @staticmethod
    async def _events(response: httpx.Response) -> AsyncIterator[ReceivedEvent]:
        fields: dict[str, str] = {}
        try:
            async for line in response.aiter_lines():
                if line:
                    name, _, value = line.partition(": ")
                    fields[name] = value
                elif "event" in fields:
                    number = int(fields["id"]) if "id" in fields else None
                    yield ReceivedEvent(number, fields["event"], json.loads(fields["data"]))
                    fields = {}
        except httpx.TransportError as error:
            raise Unanswered from error


def _code(answer: httpx.Response) -> str:
    try:
        return str(answer.json().get("code"))
    except ValueError:
        return ""
