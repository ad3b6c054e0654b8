"""
The pages for a browser: where to start, and the documentation of the API.

They need no key, load nothing from another origin and contain nothing but the version and the
address that the browser used. Links are relative, so that they also work behind a path prefix.
"""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, HTMLResponse, Response

from atoll.api.rest import host_header
from atoll.api.rest.responses import JsonResponse
from atoll.version import __version__

router = APIRouter(include_in_schema=False)

_HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
_VARY = {"Vary": "Accept"}
_ASSET_AGE = {"Cache-Control": "max-age=3600"}


def _headers(policy: str) -> dict[str, str]:
    return {
        "Content-Security-Policy": f"default-src 'none'; {policy}; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto; padding: 0 1rem }
pre { background: #f3f4f6; color: #111; padding: 1rem; overflow-x: auto }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

_HOME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Atoll</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<h1>Atoll {version}</h1>
<p>This server runs the code that AI agents write, in isolated sandboxes.</p>
<ul>
<li><a href="docs">API documentation</a>, where you can try requests (<a href="openapi.json">OpenAPI</a>)</li>
<li><a href="health">Health</a></li>
</ul>
<h2>First request</h2>
<p>Requests need an API key. When it starts, <code>atoll serve</code> prints which file on the server has the first
one. With the key in <code>ATOLL_API_KEY</code>, this creates a session:</p>
<pre>curl -s {url}/api/v1/sessions -X POST -H "Authorization: Bearer $ATOLL_API_KEY" \\
  -H 'Content-Type: application/json' -d '{{}}'</pre>
<h2>If something does not work</h2>
<p>Run <code>atoll doctor</code> on the server: it checks what the machine provides and how to fix what is missing.</p>
</body>
</html>
"""  # noqa: E501

_DOCS = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Atoll API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""

# The validator is a service on the internet that Swagger UI would send the document's address to.
_START = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
});
"""


@router.get("/")
async def home(request: Request) -> Response:
    """A page for browsers, JSON for others."""
    if "text/html" not in request.headers.get("accept", ""):
        found = {"name": "Atoll", "version": __version__, "documentation": "/docs"}
        return JsonResponse(found, headers=_VARY)
    page = _HOME.format(style=_STYLE, version=escape(__version__), url=escape(_url(request)))
    policy = f"img-src data:; style-src 'sha256-{_STYLE_HASH}'"
    return HTMLResponse(page, headers={**_headers(policy), **_VARY})


@router.get("/docs")
async def docs() -> Response:
    # Swagger UI sets style attributes.
    policy = (
        "script-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "style-src 'self' 'unsafe-inline'"
    )
    return HTMLResponse(_DOCS, headers=_headers(policy))


@router.get("/docs/start.js")
async def start() -> Response:
    return Response(_START, media_type="text/javascript", headers=_ASSET_AGE)


@router.get("/docs/swagger-ui.css")
async def style() -> Response:
    return FileResponse(_asset("swagger-ui.css"), media_type="text/css", headers=_ASSET_AGE)


@router.get("/docs/swagger-ui-bundle.js")
async def script() -> Response:
    return FileResponse(
        _asset("swagger-ui-bundle.js"), media_type="text/javascript", headers=_ASSET_AGE
    )


def _asset(name: str) -> Path:
    return Path(str(files("fastapi_offline"))) / "static" / name


def _url(request: Request) -> str:
    """As the browser named this server; the line is meant to be pasted into a shell."""
    host = request.headers.get("host", "")
    if _HOST.fullmatch(host) is None or host.encode() == host_header.UNKNOWN:
        host = "localhost"
    return f"{request.url.scheme}://{host}"
