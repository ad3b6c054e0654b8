"""The route for probes of other nodes: whether this node is healthy. It needs no API key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.api.internal.executor_callbacks import bearer
from atoll.api.rest import problems
from atoll.api.rest.responses import JsonResponse
from atoll.errors import AtollError
from atoll.service.nodes.probe import PATH

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from atoll.service.nodes.probe import NodeProbe
    from atoll.service.nodes.service import Nodes


class NodeProbeRoute:
    """Serves probes and passes all other requests on."""

    def __init__(self, app: ASGIApp, nodes: Nodes, probe: NodeProbe) -> None:
        self._app = app
        self._nodes = nodes
        self._probe = probe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        try:
            self._probe.verify(bearer(scope, "a probe's token"), self._nodes.id)
            problem = await self._nodes.local.problem()
        except AtollError as error:
            await problems.problem(error)(scope, receive, send)
            return
        content = {"id": self._nodes.id, "problem": problem}
        await JsonResponse(content, 200 if problem is None else 503)(scope, receive, send)
