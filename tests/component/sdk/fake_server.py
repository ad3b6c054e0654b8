"""
A fake server: the REST API, and a sandbox whose behaviour the test scripts.

Code that is a JSON object describes its own execution. `events` is a list of [kind, content] that
are sent first, `out` a list of [stream, text], and `ask` a list of questions whose answers become
the return value. `hold` keeps the execution running until the test releases it or it is cancelled.
`result` overrides members of the result. Any other code is written to stdout.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import tarfile
import threading
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

KEY = "atoll_test_key_0123456789"
NOW = "2024-05-01T12:00:00Z"
PAGE = 2
REQUESTED_STATE = {
    "start": "running",
    "resume": "running",
    "pause": "paused",
    "stop": "stopped",
    "archive": "archived",
}
"""Requested state by verb."""


def problem(status: int, code: str, detail: str = "no", **more: Any) -> JSONResponse:
    headers = {"retry-after": "7"} if status in (429, 503) else {}
    body = {"type": "about:blank", "title": "t", "status": status, "detail": detail, "code": code}
    return JSONResponse(body | more, status, headers, media_type="application/problem+json")


async def _drop(message: Any) -> None:
    """Receives lost responses."""


@dataclass
class Running:
    id: str
    session_id: str
    request: dict[str, Any]
    events: list[tuple[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False
    reason: str | None = None
    invocation: dict[str, Any] | None = None
    question: dict[str, Any] | None = None
    answers: list[dict[str, Any]] = field(default_factory=list)
    injected: list[Any] = field(default_factory=list)


NODE = {
    "id": "local",
    "type": "local",
    "url": "",
    "status": "healthy",
    "problem": None,
    "cordoned": False,
    "drain": None,
    "labels": {"zone": "a"},
    "missing": {"disk_quota": "no loop devices"},
    "cpu_usage": 0.25,
    "cpu_count": 2,
    "mem_usage": 0.5,
    "session_count": 1,
    "max_sessions": None,
    "cached_templates": ["python@1"],
    "last_heartbeat": NOW,
    "failure_count": 0,
}


@dataclass
class FakeServer:
    sessions: dict[str, dict[str, Any]] = field(default_factory=dict)
    executions: dict[str, Running] = field(default_factory=dict)
    invocations: dict[str, Running] = field(default_factory=dict)
    unread: int = 0
    """How often stdin is full before it accepts input."""
    unheard: int = 0
    """How many answers arrive before the question is known."""
    templates: dict[str, dict[str, Any]] = field(default_factory=dict)
    node: dict[str, Any] = field(default_factory=lambda: dict(NODE))
    removed_nodes: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    links: set[str] = field(default_factory=set)
    archive: bytes | None = None
    """Sent as the tar of any directory."""
    etags: bool = False
    """Whether files have etags; if so, ranges are supported."""
    cuts: list[int] = field(default_factory=list)
    """Bytes after which each of the next downloads is interrupted."""
    watched: list[list[tuple[str, Any]]] = field(default_factory=list)
    """Events of each file watch. The connection is lost after the last of them."""
    checkpoint: dict[str, Any] | None = None
    becoming: list[dict[str, Any] | JSONResponse] = field(default_factory=list)
    """Fields to change in the next responses to `start`, `stop` and the other verbs."""
    waits: list[float] = field(default_factory=list)
    """Requested waits of these."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    failure: JSONResponse | None = None
    instead: list[Response] = field(default_factory=list)
    """Responses to the next requests, instead of the real ones."""
    undelivered: int = 0
    """How many PUTs and DELETEs succeed with a lost response."""
    lost_answers: int = 0
    """How many responses to POSTs are lost."""
    in_flight: int = 0
    """How many POSTs after those are in flight."""
    keys: list[str | None] = field(default_factory=list)
    """Idempotency key of each POST."""
    cut_events_after: int | None = None
    key: str | None = KEY
    started: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released when an execution is held."""
    largest_chunk: int = 0
    url: str = ""
    loop: asyncio.AbstractEventLoop | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def release(self) -> None:
        assert self.loop is not None
        for running in list(self.executions.values()):
            self.loop.call_soon_threadsafe(running.released.set)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.loop = asyncio.get_running_loop()
            self.requests.append((scope["method"], scope["raw_path"].decode().split("?")[0]))
            self.headers = {k.decode(): v.decode() for k, v in scope["headers"]}
            answer: Response | None = self.failure
            if self.instead:
                answer = self.instead.pop(0)
            if self.undelivered and scope["method"] in ("PUT", "DELETE"):
                self.undelivered -= 1
                await self.app(scope, receive, _drop)
                head = {"status": 200, "headers": [(b"content-length", b"10")]}
                await send({"type": "http.response.start", **head})
                return
            if self.key and self.headers.get("authorization") != f"Bearer {self.key}":
                answer = problem(401, "unauthenticated", "The key is missing or wrong.")
            if scope["method"] == "POST":
                self.keys.append(self.headers.get("idempotency-key"))
                if self.lost_answers:
                    self.lost_answers -= 1
                    head = {"status": 201, "headers": [(b"content-length", b"10")]}
                    await send({"type": "http.response.start", **head})
                    return
                if self.in_flight:
                    self.in_flight -= 1
                    answer = problem(409, "idempotency_in_flight")
            if answer is not None:
                await answer(scope, receive, send)
                return
        await self.app(scope, receive, send)

    @property
    def app(self) -> Starlette:
        s, e = "/api/v1/sessions", "/api/v1/executions/{id}"
        return Starlette(
            routes=[
                Route(s, self.create, methods=["POST"]),
                Route(s, self.list_sessions),
                Route(s + "/{id}", self.one_session, methods=["GET", "PATCH", "DELETE"]),
                Route(s + "/{id}/clone", self.clone, methods=["POST"]),
                Route(s + "/{id}/execute", self.execute, methods=["POST"]),
                *(
                    Route(f"{s}/{{id}}/{verb}", self.become, methods=["POST"])
                    for verb in REQUESTED_STATE
                ),
                Route(s + "/{id}/executions", self.list_executions),
                Route(e, self.execution),
                Route(e + "/status", self.status),
                Route(e + "/result", self.result),
                Route(e + "/cancel", self.cancel, methods=["POST"]),
                Route(e + "/inject", self.inject, methods=["POST"]),
                Route(e + "/resume", self.resume, methods=["POST"]),
                Route("/api/v1/executions", self.list_executions),
                Route("/api/v1/invocations", self.all_invocations, methods=["GET", "POST"]),
                Route("/api/v1/invocations/{id}", self.one_invocation),
                Route("/api/v1/invocations/{id}/executions", self.executions_of),
                Route("/api/v1/invocations/{id}/cancel", self.cancel_invocation, methods=["POST"]),
                Route(e + "/events", self.stream),
                Route(s + "/{id}/files", self.list_files),
                Route(s + "/{id}/files/watch", self.watch),
                Route(s + "/{id}/checkpoint", self.save, methods=["GET", "POST"]),
                Route(s + "/{id}/files/mkdir", self.mkdir, methods=["POST"]),
                Route(s + "/{id}/files/move", self.move, methods=["POST"]),
                Route(s + "/{id}/files/{path:path}", self.file, methods=["GET", "PUT", "DELETE"]),
                Route("/api/v1/templates", self.all_templates, methods=["GET", "POST"]),
                Route(
                    "/api/v1/templates/{id}", self.one_template, methods=["GET", "PUT", "DELETE"]
                ),
                Route("/api/v1/nodes", self.nodes),
                Route("/api/v1/nodes/{id}", self.one_node, methods=["GET", "DELETE"]),
                Route("/api/v1/nodes/{id}/{verb}", self.to_node, methods=["POST"]),
                Route("/api/v1/runtimes", self.nodes),
                Route("/api/v1/pools", self.pools),
                Route("/api/v1/runtimes/{id}/health", self.health),
                Route("/api/v1/runtimes/{id}/metrics", self.metrics),
            ]
        )

    # sessions

    async def create(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        session = {
            "id": f"sess_{len(self.sessions):04}",
            "template_id": body.get("template_id", "python"),
            "status": "running",
            "wanted": "running",
            "runtime_type": "local",
            "runtime_node": "local",
            "container_id": "inst_1",
            "pod_name": None,
            "resources": {"cpu": "1", "memory": "512Mi", "disk": "1Gi", "max_processes": 128},
            "env_vars": body.get("env_vars", {}),
            "timeout": body.get("timeout", 300),
            "capacity": body.get("capacity", 1),
            "created_at": NOW,
            "updated_at": NOW,
            "expires_at": NOW,
            "ended_at": None,
            "cause": None,
            "message": None,
            "a_member_of_a_newer_server": True,
        }
        self.sessions[session["id"]] = session
        return JSONResponse(session, 201)

    async def list_sessions(self, request: Request) -> Response:
        wanted = request.query_params.get("status")
        return self.page(
            request, [s for s in self.sessions.values() if wanted in (None, s["status"])]
        )

    async def one_session(self, request: Request) -> Response:
        session = self.sessions.get(request.path_params["id"])
        if session is None:
            return problem(404, "session_not_found", "There is no such session.", hint="look")
        if request.method == "DELETE":
            session |= {"status": "terminated", "wanted": "destroyed", "cause": "user"}
        if request.method == "PATCH":
            self.bodies.append(await request.json())
            session |= {k: v for k, v in self.bodies[-1].items() if k in ("timeout", "labels")}
        return JSONResponse(session)

    async def become(self, request: Request) -> Response:
        session = self.sessions[request.path_params["id"]]
        verb = request.url.path.rpartition("/")[2]
        self.waits.append(float(request.query_params["wait"]))
        otherwise = self.becoming.pop(0) if self.becoming else {}
        if isinstance(otherwise, JSONResponse):
            session["wanted"] = REQUESTED_STATE[verb]
            return otherwise
        session |= {"wanted": REQUESTED_STATE[verb], "status": REQUESTED_STATE[verb], **otherwise}
        session["expires_at"] = None if session["status"] in ("stopped", "archived") else NOW
        return JSONResponse(session)

    async def clone(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        source = self.sessions[request.path_params["id"]]
        session = source | {"id": f"sess_{len(self.sessions):04}", "started_from": source["id"]}
        self.sessions[session["id"]] = session
        return JSONResponse(session, 201)

    def page(self, request: Request, items: list[Any]) -> Response:
        start = int(request.query_params.get("cursor", "0"))
        end = start + PAGE
        after = str(end) if end < len(items) else None
        return JSONResponse({"items": items[start:end], "next_cursor": after})

    # executions

    async def execute(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        running = self.begin(request.path_params["id"], body)
        preferred = request.headers.get("prefer", "wait=0").removeprefix("wait=")
        if (result := await self.in_thread(running, float(preferred))) is not None:
            return JSONResponse(result)
        submitted = {"execution_id": running.id, "status": "submitted", "submitted_at": NOW}
        return JSONResponse(submitted, 202)

    def begin(self, session_id: str, body: dict[str, Any]) -> Running:
        execution_id = body.get("execution_id") or f"exec_20240501_{len(self.executions)}"
        if execution_id in self.executions:
            return self.executions[execution_id]
        running = Running(execution_id, session_id, body)
        self.executions[running.id] = running
        task = asyncio.create_task(self.play(running))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return running

    async def play(self, running: Running) -> None:
        code = running.request.get("code") or json.dumps(
            {"out": [["stdout", " ".join(running.request.get("command", []))]]}
        )
        script: dict[str, Any] = (
            json.loads(code) if code.startswith("{") else {"out": [["stdout", code]]}
        )
        for kind, content in script.get("events", []):
            await self.note(running, kind, content)
        await self.note(running, "started", {"attempt": 1})
        outputs = {"stdout": "", "stderr": ""}
        for stream, text in script.get("out", []):
            outputs[stream] += text
            await self.note(running, stream, {"text": text})
        for stream, text in script.get("raw", []):
            await self.note(running, stream, {"base64": text})
        for number, question in enumerate(script.get("ask", []), 1):
            asked = {"id": str(number), "state": "asked", "question": question, "data": [number]}
            running.question = asked | {"timeout": 300}
            await self.note(running, "approval", running.question)
            async with running.changed:
                while len(running.answers) < number and not running.cancelled:
                    await running.changed.wait()
            if running.cancelled:
                break
            settled = {"id": str(number), "state": "answered", **running.answers[-1]}
            await self.note(running, "approval", settled)
        if script.get("hold"):
            self.started.release()
            await running.released.wait()
        result: dict[str, Any] = {
            "execution_id": running.id,
            "status": "error" if running.cancelled else "success",
            **outputs,
            "exit_code": None if running.cancelled else 0,
            "execution_time": 0.01,
            "return_value": running.answers
            or running.request.get("event", running.request.get("input")),
            "results": [],
            "metrics": {
                "duration_ms": 1.0,
                "cpu_time_ms": 1.0,
                "peak_memory_mb": 1.0,
                "bytes_read": 0,
                "bytes_written": 0,
            },
            "artifacts": ["out.txt"],
            "cause": "user" if running.cancelled else "exit",
            "signal": None,
            "error": None,
            "stdout_truncated": False,
            "stdout_bytes": len(outputs["stdout"].encode()),
            "stderr_truncated": False,
            "stderr_bytes": len(outputs["stderr"].encode()),
            "artifacts_truncated": False,
        } | script.get("result", {})
        running.result = result
        await self.note(running, "result", result)

    async def note(self, running: Running, kind: str, data: Any) -> None:
        async with running.changed:
            running.events.append((kind, data))
            running.changed.notify_all()

    async def in_thread(self, running: Running, wait: float) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(wait), running.changed:
                await running.changed.wait_for(lambda: running.result is not None)
        except TimeoutError:
            return None
        return running.result

    async def execution(self, request: Request) -> Response:
        return JSONResponse(self.record(self.executions[request.path_params["id"]]))

    def record(self, running: Running) -> dict[str, Any]:
        return (running.result or {}) | {
            "id": running.id,
            "session_id": running.session_id,
            "status": self.status_of(running)["status"],
            "invocation_id": None
            if running.invocation is None
            else running.invocation["invocation_id"],
            "timeout": 30.0,
            "command": None,
            "approval": running.question,
            "retry_count": 1,
            "attempts": [
                {
                    "started_at": NOW,
                    "ended_at": NOW,
                    "node_id": "local",
                    "container_id": "inst_1",
                    "cause": "node_lost",
                    "message": None,
                }
            ],
            "created_at": NOW,
            "artifacts": [
                {
                    "path": "out.txt",
                    "size": 3,
                    "mime_type": "text/plain",
                    "type": "artifact",
                    "created_at": NOW,
                    "checksum": None,
                    "download_url": None,
                }
            ],
        }

    async def list_executions(self, request: Request) -> Response:
        wanted = request.query_params.get("status")
        found = [self.record(running) for running in self.executions.values()]
        return self.page(request, [r for r in found if wanted in (None, r["status"])])

    def status_of(self, running: Running) -> dict[str, Any]:
        ended = "cancelled" if running.cancelled else "completed"
        return {
            "execution_id": running.id,
            "session_id": running.session_id,
            "status": ended if running.result else "running",
            "cause": None,
            "created_at": NOW,
            "completed_at": None,
        }

    async def status(self, request: Request) -> Response:
        return JSONResponse(self.status_of(self.executions[request.path_params["id"]]))

    async def result(self, request: Request) -> Response:
        running = self.executions[request.path_params["id"]]
        wait = float(request.query_params.get("wait", 0))
        if (result := await self.in_thread(running, wait)) is None:
            return problem(409, "execution_not_finished", "It still runs.")
        return JSONResponse(result)

    async def cancel(self, request: Request) -> Response:
        running = self.executions[request.path_params["id"]]
        if running.result is not None and not running.cancelled:
            return problem(409, "execution_ended", status_now="completed")
        await self.end(running, await request.body())
        return JSONResponse(self.status_of(running))

    async def end(self, running: Running, body: bytes) -> None:
        running.cancelled = True
        running.reason = json.loads(body or b"{}").get("reason")
        running.released.set()
        async with running.changed:
            running.changed.notify_all()
        await self.in_thread(running, 10)

    async def inject(self, request: Request) -> Response:
        running = self.executions[request.path_params["id"]]
        body = await request.json()
        if running.result is not None:
            return problem(409, "execution_not_running", status_now="completed")
        if self.unread:
            self.unread -= 1
            return problem(429, "queue_full")
        running.injected.append(body)
        return JSONResponse(self.status_of(running))

    async def resume(self, request: Request) -> Response:
        running = self.executions[request.path_params["id"]]
        body = await request.json()
        asked = running.question
        if self.unheard:
            self.unheard -= 1
            asked = None
        if asked is None or body.get("approval_id", asked["id"]) != asked["id"]:
            return problem(409, "no_approval", status_now=self.status_of(running)["status"])
        running.question = None
        async with running.changed:
            running.answers.append({name: body[name] for name in body if name != "approval_id"})
            running.changed.notify_all()
        return JSONResponse(self.status_of(running))

    # invocations

    async def all_invocations(self, request: Request) -> Response:
        if request.method == "GET":
            wanted = request.query_params.get("status")
            found = [self.invocation_of(running) for running in self.invocations.values()]
            return self.page(request, [i for i in found if wanted in (None, i["status"])])
        body = await request.json()
        self.bodies.append(body)
        running = self.begin(body["session_id"], body)
        if running.invocation is None:
            running.invocation = {
                "invocation_id": body.get("invocation_id", f"inv_{len(self.invocations)}"),
                "execution_id": running.id,
                "session_id": running.session_id,
                "function_name": body.get("function_name"),
                "mode": body["mode"],
                "metadata": body.get("metadata", {}),
                "created_at": NOW,
                "completed_at": None,
                "console_url": None,
            }
            self.invocations[running.invocation["invocation_id"]] = running
        return JSONResponse(self.invocation_of(running), 202)

    def invocation_of(self, running: Running) -> dict[str, Any]:
        words = {"completed": "succeeded", "cancelled": "cancelled", "running": "running"}
        status = words[self.status_of(running)["status"]]
        return {**(running.invocation or {}), "status": status, "result": running.result}

    async def one_invocation(self, request: Request) -> Response:
        running = self.invocations.get(request.path_params["id"])
        if running is None:
            return problem(404, "invocation_not_found", "There is no such invocation.")
        return JSONResponse(self.invocation_of(running))

    async def executions_of(self, request: Request) -> Response:
        return self.page(request, [self.record(self.invocations[request.path_params["id"]])])

    async def cancel_invocation(self, request: Request) -> Response:
        running = self.invocations[request.path_params["id"]]
        if running.result is not None and not running.cancelled:
            return problem(409, "invocation_ended", status_now="succeeded")
        await self.end(running, await request.body())
        return JSONResponse(self.invocation_of(running))

    async def stream(self, request: Request) -> Response:
        running = self.executions[request.path_params["id"]]
        after = int(request.headers.get("last-event-id", "0"))

        async def body() -> AsyncIterator[bytes]:
            sequence, sent = after, 0
            yield b": ping\n\n"
            while True:
                if running.result is not None and sequence >= len(running.events):
                    return
                async with running.changed:
                    while len(running.events) <= sequence:
                        await running.changed.wait()
                kind, data = running.events[sequence]
                sequence += 1
                if sent == self.cut_events_after:
                    self.cut_events_after = None
                    return
                sent += 1
                text = json.dumps(data, ensure_ascii=False)
                yield f"id: {sequence}\nevent: {kind}\ndata: {text}\n\n".encode()
                if kind == "result":
                    return

        return StreamingResponse(body(), media_type="text/event-stream")

    # files

    def entry(self, path: str) -> dict[str, Any]:
        kind = "file" if path in self.files else "directory"
        return {
            "path": path,
            "name": path.rsplit("/", 1)[-1],
            "type": "symlink" if path in self.links else kind,
            "size": len(self.files.get(path, b"")),
            "mode": "0644",
            "modified_at": NOW,
        }

    def is_directory(self, path: str) -> bool:
        return path == "." or any(name.startswith(path + "/") for name in self.files)

    async def list_files(self, request: Request) -> Response:
        top = request.query_params.get("path", ".")
        prefix = "" if top == "." else top + "/"
        inside = [name[len(prefix) :] for name in sorted(self.files) if name.startswith(prefix)]
        names = dict.fromkeys(name.split("/")[0] for name in inside if name)
        return self.page(request, [self.entry(prefix + name) for name in names])

    async def file(self, request: Request) -> Response:
        path = request.path_params["path"]
        if "archive" in request.query_params:
            return await self.tree(request, path)
        if request.method == "PUT":
            data = b""
            async for chunk in request.stream():
                self.largest_chunk = max(self.largest_chunk, len(chunk))
                data += chunk
            self.files[path] = data
            return JSONResponse(self.entry(path), 201)
        if path not in self.files and not self.is_directory(path):
            return problem(404, "file_not_found", f"There is no file {path}.")
        if request.method == "DELETE":
            self.bodies.append(dict(request.query_params))
            del self.files[path]
            return Response(status_code=204)
        if request.query_params.get("metadata") == "true":
            return JSONResponse(self.entry(path))

        data, status, headers = self.files[path], 200, {}
        if self.etags:
            # As wide as a tag of the real one; of the content alone, so a test can change it.
            etag = f'"{zlib.crc32(data):032x}"'
            headers = {"etag": etag}
            if request.headers.get("if-match", etag) != etag:
                return problem(412, "precondition_failed")
            if wanted := request.headers.get("range"):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start = int(first) if first else max(0, len(data) - int(last))
                stop = min(len(data), int(last) + 1 if first and last else len(data))
                if start >= len(data):
                    return problem(416, "range_not_satisfiable")
                headers["content-range"] = f"bytes {start}-{stop - 1}/{len(data)}"
                data, status = data[start:stop], 206
            headers["content-length"] = str(len(data))
        cut = self.cuts.pop(0) if self.cuts else None

        async def body() -> AsyncIterator[bytes]:
            for start in range(0, len(data[:cut]), 65536):
                yield data[:cut][start : start + 65536]
            if cut is not None or path.startswith("broken"):
                raise ConnectionError("cut in the middle")

        return StreamingResponse(body(), status, headers)

    async def tree(self, request: Request, path: str) -> Response:
        prefix = "" if path == "." else path + "/"
        if request.method == "PUT":
            with tarfile.open(fileobj=io.BytesIO(await request.body())) as archive:
                for member in archive:
                    if member.issym():
                        self.links.add(prefix + member.name)
                        self.files[prefix + member.name] = member.linkname.encode()
                    elif (file := archive.extractfile(member)) is not None:
                        self.files[prefix + member.name] = file.read()
            return JSONResponse({"path": path, "entries": 1})
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, data in self.files.items():
                if name.startswith(prefix):
                    info = tarfile.TarInfo(name[len(prefix) :])
                    info.size = len(data)
                    if name in self.links:
                        info.type, info.linkname, info.size = tarfile.SYMTYPE, data.decode(), 0
                    archive.addfile(info, io.BytesIO(data))
        whole = packed.getvalue() if self.archive is None else self.archive

        async def body() -> AsyncIterator[bytes]:
            # In pieces that have nothing to do with where entries begin.
            for start in range(0, len(whole), 700):
                yield whole[start : start + 700]

        return StreamingResponse(body())

    async def watch(self, request: Request) -> Response:
        self.bodies.append(dict(request.query_params))
        if not self.watched:
            return problem(409, "session_not_running")
        notices = self.watched.pop(0)

        async def body() -> AsyncIterator[str]:
            for kind, content in notices:
                yield f"event: {kind}\ndata: {json.dumps(content)}\n\n"
            if kind != "end":
                raise ConnectionError("cut in the middle")

        return StreamingResponse(body(), media_type="text/event-stream")

    async def save(self, request: Request) -> Response:
        if request.method == "POST":
            number = 1 if self.checkpoint is None else self.checkpoint["number"] + 1
            saved = {"number": number, "created_at": NOW, "files": len(self.files), "size": 7}
            self.checkpoint = {"session_id": request.path_params["id"], "kept_until": None} | saved
        if self.checkpoint is None:
            return problem(404, "checkpoint_not_found")
        return JSONResponse(self.checkpoint)

    async def mkdir(self, request: Request) -> Response:
        body = await request.json()
        self.files.setdefault(body["path"] + "/", b"")
        return JSONResponse(self.entry(body["path"]), 201)

    async def move(self, request: Request) -> Response:
        body = await request.json()
        self.files[body["target"]] = self.files.pop(body["source"])
        return JSONResponse(self.entry(body["target"]))

    # templates and nodes

    async def all_templates(self, request: Request) -> Response:
        if request.method == "GET":
            return self.page(request, list(self.templates.values()))
        body = await request.json()
        self.bodies.append(body)
        name = body.get("id") or f"tmpl_{len(self.templates)}"
        return JSONResponse(self.put_template(name, body), 201)

    def put_template(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        resources = {"cpu": "1", "memory": "512Mi", "disk": "1Gi", "max_processes": 128}
        resources |= body.pop("default_resources", {})
        self.templates[name] = {
            "image": "",
            "security_context": {"require": []},
            **body,
            "id": name,
            "default_resources": resources,
            "version": 1,
            "created_at": NOW,
            "updated_at": NOW,
        }
        return self.templates[name]

    async def one_template(self, request: Request) -> Response:
        name = request.path_params["id"]
        if name not in self.templates:
            return problem(404, "template_not_found", f"There is no template {name}.")
        if request.method == "PUT":
            body = await request.json()
            self.bodies.append(dict(body))
            return JSONResponse(self.put_template(name, body))
        if request.method == "DELETE":
            del self.templates[name]
            return Response(status_code=204)
        return JSONResponse(self.templates[name])

    async def nodes(self, request: Request) -> Response:
        return self.page(request, [self.node])

    async def one_node(self, request: Request) -> Response:
        if request.method == "DELETE":
            self.removed_nodes.append(request.path_params["id"])
            return Response(status_code=204)
        drain = self.node["drain"]
        if drain is not None:
            # One session leaves between two looks.
            self.node["drain"] = {**drain, "left": max(0, drain["left"] - 1)}
        return JSONResponse(self.node)

    async def to_node(self, request: Request) -> Response:
        verb = request.path_params["verb"]
        self.node["cordoned"] = verb != "uncordon"
        drain = {"total": 2, "left": 2, "message": None}
        self.node["drain"] = drain if verb == "drain" else None
        return JSONResponse(self.node, 202 if verb == "drain" else 200)

    async def health(self, request: Request) -> Response:
        missing = {"disk_quota": "no loop devices"}
        body = {"id": "local", "status": "healthy", "checked_at": NOW, "provides": ["seccomp"]}
        return JSONResponse(body | {"missing": missing})

    async def metrics(self, request: Request) -> Response:
        numbers = {"cpu_usage": 0.1, "cpu_count": 2, "load_average": 0.5, "mem_usage": 0.2}
        more = {"mem_total": 1, "disk_free": 1, "session_count": 0, "pool": {"python": 2}}
        return JSONResponse({"id": "local"} | numbers | more)

    async def pools(self, request: Request) -> Response:
        pool = {
            "template_id": "python",
            "version": 1,
            "ready": 2,
            "starting": 1,
            "others": 4,
            "target": 3,
            "wanted": 8,
            "minimum": 2,
            "maximum": 50,
            "rate_per_minute": 90.0,
            "start_seconds": 0.05,
            "memory": 7_000_000,
            "hits": 10,
            "misses": 2,
            "oldest_seconds": None,
            "limited_by": "memory_share",
            "message": None,
        }
        return self.page(request, [pool])


class ServerThread:
    """A `FakeServer` on a free port of loopback, with TLS if there is a certificate (PEM)."""

    def __init__(self, fake_server: FakeServer, certificate: str | None = None) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        scheme = "http" if certificate is None else "https"
        fake_server.url = f"{scheme}://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(
            fake_server,
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=1,
            ssl_certfile=certificate,
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))

    def __enter__(self) -> ServerThread:
        # The socket listens already, so a client that is early only waits.
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.socket.close()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
