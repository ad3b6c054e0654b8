"""The watch of pods against a server that ends it in the ways of real API servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from atoll.drivers.kubernetes.access import ClusterAccess
from atoll.drivers.kubernetes.api import ApiClient
from atoll.drivers.kubernetes.pod_state import pod_state
from atoll.drivers.kubernetes.pod_watch import PodWatch
from atoll.settings import KubernetesSettings

pytestmark = pytest.mark.anyio

PATH = "/api/v1/namespaces/n/pods"
EXPIRED = {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}


def pod(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": name, "resourceVersion": str(version)}, "status": {}}


def event(kind: str, name: str, version: int) -> dict[str, Any]:
    return {"type": kind, "object": pod(name, version)}


class Server:
    """Answers lists and watches in the order in which a test gives them."""

    def __init__(self) -> None:
        self.lists: asyncio.Queue[tuple[int, list[dict[str, Any]]]] = asyncio.Queue()
        """Version and pods."""
        self.watches: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self.resumed_from: list[str] = []
        self.list_requested = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            self.list_requested.set()
            version, pods = await self.lists.get()
            return web.json_response({"metadata": {"resourceVersion": str(version)}, "items": pods})
        self.resumed_from.append(request.query["resourceVersion"])
        events = await self.watches.get()
        response = web.StreamResponse()
        await response.prepare(request)
        for one in events:
            await response.write(json.dumps(one).encode() + b"\n")
        return response


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def watch(server: Server) -> AsyncIterator[PodWatch]:
    """Not open yet."""
    app = web.Application()
    app.router.add_get(PATH, server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    api = ApiClient(ClusterAccess(f"http://{host}:{port}", None), KubernetesSettings())
    await api.open()
    made = PodWatch(api, PATH, "label")
    yield made
    await made.close()
    await api.close()
    await runner.cleanup()


async def test_an_expired_watch_lists_all_pods_again(server: Server, watch: PodWatch) -> None:
    server.lists.put_nowait((5, [pod("a", 3), pod("b", 4)]))
    await watch.open()
    gone = asyncio.create_task(watch.wait("a", lambda found: found is None))
    server.watches.put_nowait([EXPIRED])
    for _ in range(2):  # Until the watch is open again, each question is a list.
        server.lists.put_nowait((9, [pod("b", 8)]))
    assert await gone is None
    assert {found.name for found in await watch.all()} == {"b"}


async def test_a_watch_resumes_after_the_last_bookmark(server: Server, watch: PodWatch) -> None:
    server.lists.put_nowait((5, []))
    await watch.open()
    server.watches.put_nowait([event("ADDED", "a", 7), event("BOOKMARK", "", 9)])
    server.watches.put_nowait([event("DELETED", "a", 11)])
    assert await watch.wait("a", lambda found: found is None) is None
    assert server.resumed_from[:2] == ["5", "9"]
    assert watch.lists == 1


async def test_a_pod_that_was_made_during_a_list_is_not_taken_for_deleted(
    server: Server, watch: PodWatch
) -> None:
    server.lists.put_nowait((5, []))
    await watch.open()
    server.list_requested.clear()
    server.watches.put_nowait([EXPIRED])
    await server.list_requested.wait()
    # Made after the server had read its pods for the list, and before the list arrived.
    watch.note(pod_state(pod("a", 10)))
    server.lists.put_nowait((9, []))
    server.watches.put_nowait([event("MODIFIED", "a", 12)])
    found = await watch.wait("a", lambda found: found is None or found.version == "12")
    assert found is not None


async def test_a_deleted_pod_does_not_come_back_from_a_late_answer(
    server: Server, watch: PodWatch
) -> None:
    server.lists.put_nowait((5, [pod("a", 3)]))
    await watch.open()
    server.watches.put_nowait([event("DELETED", "a", 7)])
    assert await watch.wait("a", lambda found: found is None) is None
    watch.note(pod_state(pod("a", 6)))
    assert watch.known() == []
    last = watch.deleted("a")
    assert last is not None
    assert last.version == "7"


async def test_versions_that_go_backwards_are_believed_after_a_list(
    server: Server, watch: PodWatch
) -> None:
    """As after the storage of the cluster was restored from a backup."""
    server.lists.put_nowait((500, [pod("a", 300), pod("b", 400)]))
    await watch.open()
    server.watches.put_nowait([EXPIRED])
    server.lists.put_nowait((50, [pod("a", 30)]))
    found = await watch.wait("a", lambda found: found is None or found.version == "30")
    assert found is not None
    assert [one.name for one in watch.known()] == ["a"]
