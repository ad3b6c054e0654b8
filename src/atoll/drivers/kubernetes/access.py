"""
How the API server is reached: its address, its certificate authority, and Atoll's credentials.

Inside a cluster these are the files of the pod's service account, whose token is read again before
it expires. Outside it is a kubeconfig with a certificate, a token, or a program that prints one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from atoll.errors import InvalidRequest, TemporaryError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_LIFETIME = 60.0
"""Seconds for which a token from a file is used before it is read again."""
PLUGIN_TIMEOUT = 60.0
DEFAULT_NAMESPACE = "default"


class InvalidKubeconfig(InvalidRequest):
    code = "invalid_kubeconfig"


class NoToken(TemporaryError):
    """The credential program of the kubeconfig printed no token."""

    code = "cluster_unavailable"


@dataclass
class ClusterAccess:
    server: str
    """The URL of the API server, without a slash at the end."""
    tls: ssl.SSLContext | None
    namespace: str = DEFAULT_NAMESPACE
    in_cluster: bool = False
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    plugin: dict[str, Any] | None = None
    """The `exec` section of a user: a program that prints a token."""
    _valid_until: float = 0.0
    """Monotonic clock; until then `token` is used."""
    _refresh: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def headers(self) -> dict[str, str]:
        if self.token_file is not None or self.plugin is not None:
            async with self._refresh:
                if time.monotonic() >= self._valid_until:
                    await self._renew()
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    async def _renew(self) -> None:
        if self.token_file is not None:
            self.token = (await asyncio.to_thread(self.token_file.read_text)).strip()
            self._valid_until = time.monotonic() + TOKEN_LIFETIME
        elif self.plugin is not None:
            self.token, seconds = await _run_plugin(self.plugin)
            self._valid_until = time.monotonic() + seconds

    def forwards(self, link: str) -> bool:
        """Whether executors are reached through the API server; `link` is the setting."""
        return link == "forward" or (link == "auto" and not self.in_cluster)

    def expire(self) -> None:
        """The API server did not accept the token: get another one for the next request."""
        self._valid_until = 0.0


def find(kubeconfig: Path | None, context: str) -> ClusterAccess:
    """
    The access that is configured: the kubeconfig that is given, that of `KUBECONFIG`, the service
    account of this pod, or the user's kubeconfig, in this order.
    """
    if kubeconfig is not None:
        return from_kubeconfig(kubeconfig, context)
    if os.environ.get("KUBECONFIG"):
        return from_kubeconfig(Path(os.environ["KUBECONFIG"].split(os.pathsep)[0]), context)
    if "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").exists():
        return from_service_account(SERVICE_ACCOUNT)
    return from_kubeconfig(Path.home() / ".kube" / "config", context)


def from_service_account(directory: Path) -> ClusterAccess:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    return ClusterAccess(
        server=f"https://{host}:{port}",
        tls=ssl.create_default_context(cafile=str(directory / "ca.crt")),
        namespace=(directory / "namespace").read_text().strip(),
        in_cluster=True,
        token_file=directory / "token",
    )


def from_kubeconfig(path: Path, context: str) -> ClusterAccess:
    """The access of a context in a kubeconfig, of the current one if it is empty."""
    try:
        config = yaml.safe_load(path.read_text())
        chosen = _named(config, "contexts", context or config["current-context"])["context"]
        cluster = _named(config, "clusters", chosen["cluster"])["cluster"]
        user = _named(config, "users", chosen["user"])["user"]
        token_file = user.get("tokenFile")
        return ClusterAccess(
            server=str(cluster["server"]).rstrip("/"),
            tls=_tls(path.parent, cluster, user),
            namespace=chosen.get("namespace") or DEFAULT_NAMESPACE,
            token=user.get("token", ""),
            token_file=None if token_file is None else path.parent / token_file,
            plugin=user.get("exec"),
        )
    except OSError as error:
        raise InvalidKubeconfig(
            f"Cannot read the kubeconfig {path}: {error.strerror}. Set "
            "ATOLL_KUBERNETES__KUBECONFIG."
        ) from error
    except (yaml.YAMLError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise InvalidKubeconfig(f"The kubeconfig {path} is not valid: {error!r}.") from error


def _named(config: dict[str, Any], section: str, name: str) -> dict[str, Any]:
    for item in config[section]:
        if item["name"] == name:
            return dict(item)
    raise LookupError(f"{section} has no {name!r}")


def _tls(base: Path, cluster: dict[str, Any], user: dict[str, Any]) -> ssl.SSLContext | None:
    if not str(cluster["server"]).startswith("https://"):
        return None
    authority = _content(base, cluster, "certificate-authority")
    context = ssl.create_default_context(cadata=None if authority is None else authority.decode())
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    certificate = _content(base, user, "client-certificate")
    key = _content(base, user, "client-key")
    if certificate is not None and key is not None:
        # The ssl module reads files alone. This one has mode 0600 and is removed at once.
        with tempfile.NamedTemporaryFile() as file:
            file.write(certificate + b"\n" + key)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _content(base: Path, section: dict[str, Any], name: str) -> bytes | None:
    """A file that is given by its path or as base64."""
    if section.get(f"{name}-data"):
        return base64.b64decode(section[f"{name}-data"])
    if section.get(name):
        return (base / str(section[name])).read_bytes()
    return None


async def _run_plugin(plugin: dict[str, Any]) -> tuple[str, float]:
    """The token that a credential plug-in prints, and for how many seconds it is valid."""
    version = plugin.get("apiVersion", "client.authentication.k8s.io/v1")
    request = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
    env = {item["name"]: item["value"] for item in plugin.get("env") or ()}
    process = await asyncio.create_subprocess_exec(
        plugin["command"],
        *(plugin.get("args") or ()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **env, "KUBERNETES_EXEC_INFO": json.dumps(request)},
    )
    try:
        async with asyncio.timeout(PLUGIN_TIMEOUT):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    try:
        status = json.loads(output)["status"]
        token = str(status["token"])
    except (ValueError, LookupError, TypeError) as error:
        raise NoToken(
            f"The credential program {plugin['command']} ended with exit code "
            f"{process.returncode} and printed no token."
        ) from error
    expires = status.get("expirationTimestamp")
    if expires is None:
        return token, TOKEN_LIFETIME
    left = datetime.fromisoformat(expires.replace("Z", "+00:00")).timestamp() - time.time()
    return token, max(0.0, left - 30)
