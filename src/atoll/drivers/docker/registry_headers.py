"""Credentials of a registry, as headers of a pull and of a build."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING

from atoll.model.image import HUB

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.drivers.base import RegistryAuth

HUB_KEY = "https://index.docker.io/v1/"
"""The engine's name of Docker Hub, the registry of image names without a server."""


def pull_headers(auth: RegistryAuth | None) -> dict[str, str]:
    return {} if auth is None else {"X-Registry-Auth": _encoded(_credentials(auth))}


def build_headers(auth: RegistryAuth | None) -> dict[str, str]:
    if auth is None:
        return {}
    return {"X-Registry-Config": _encoded({_server(auth): _credentials(auth)})}


def _server(auth: RegistryAuth) -> str:
    return HUB_KEY if auth.server == HUB else auth.server


def _credentials(auth: RegistryAuth) -> dict[str, str]:
    server = _server(auth)
    if auth.identity_token:
        return {"identitytoken": auth.identity_token, "serveraddress": server}
    return {"username": auth.username, "password": auth.password, "serveraddress": server}


def _encoded(value: Mapping[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()
