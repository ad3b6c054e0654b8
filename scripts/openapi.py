"""The OpenAPI document of the REST API, for the scripts that generate code and pages from it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any


def document() -> dict[str, Any]:
    """The document as a server serves it. The application behind it has no services."""
    return asyncio.run(_document())


async def _document() -> dict[str, Any]:
    import httpx

    from atoll.api.rest import documented_routes
    from atoll.api.rest.services import Services
    from atoll.settings import Settings

    nothing: Any = None
    names = {field.name for field in dataclasses.fields(Services)}
    services = Services(**dict.fromkeys(names - {"settings"}, nothing), settings=Settings())
    app: Any = documented_routes.build(services, nothing)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://atoll") as client:
        found: dict[str, Any] = (await client.get("/openapi.json")).json()
    return found
