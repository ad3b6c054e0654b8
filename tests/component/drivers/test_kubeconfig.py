"""Kubeconfigs and service accounts: how the API server is reached, and with which credentials."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from atoll.drivers.kubernetes import access
from atoll.drivers.kubernetes.access import InvalidKubeconfig, NoToken

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def write(path: Path, user: dict[str, Any], ca: str, **more: Any) -> Path:
    data = base64.b64encode(ca.encode()).decode()
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", **more}}],
        "clusters": [
            {
                "name": "k",
                "cluster": {
                    "server": "https://cluster.example:6443/",
                    "certificate-authority-data": data,
                },
            }
        ],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def pem(authority: trustme.CA) -> str:
    return authority.cert_pem.bytes().decode()


async def test_a_token_is_sent(tmp_path: Path, authority: trustme.CA) -> None:
    path = write(tmp_path / "config", {"token": "t0ken"}, pem(authority), namespace="sandboxes")
    found = access.find(path, "")
    assert found.server == "https://cluster.example:6443"
    assert found.namespace == "sandboxes"
    assert await found.headers() == {"Authorization": "Bearer t0ken"}
    assert "t0ken" not in repr(found)


async def test_a_token_of_a_file_is_read_again_when_it_expires(
    tmp_path: Path, authority: trustme.CA
) -> None:
    (tmp_path / "token").write_text("first\n")
    path = write(tmp_path / "config", {"tokenFile": "token"}, pem(authority))
    found = access.find(path, "c")
    assert await found.headers() == {"Authorization": "Bearer first"}
    (tmp_path / "token").write_text("second\n")
    assert await found.headers() == {"Authorization": "Bearer first"}
    found.expire()
    assert await found.headers() == {"Authorization": "Bearer second"}


async def test_a_program_prints_the_token(tmp_path: Path, authority: trustme.CA) -> None:
    status = {"status": {"token": "printed", "expirationTimestamp": "2999-01-01T00:00:00Z"}}
    program = (
        "import json, os; json.loads(os.environ['KUBERNETES_EXEC_INFO']); "
        f"print({json.dumps(status)!r})"
    )
    user = {"exec": {"command": sys.executable, "args": ["-c", program]}}
    found = access.find(write(tmp_path / "config", user, pem(authority)), "")
    assert await found.headers() == {"Authorization": "Bearer printed"}


async def test_a_program_without_a_token_is_an_error(tmp_path: Path, authority: trustme.CA) -> None:
    user = {"exec": {"command": sys.executable, "args": ["-c", "raise SystemExit(3)"]}}
    found = access.find(write(tmp_path / "config", user, pem(authority)), "")
    with pytest.raises(NoToken, match="exit code 3"):
        await found.headers()


async def test_a_client_certificate_is_loaded(tmp_path: Path, authority: trustme.CA) -> None:
    pair = authority.issue_cert("client.example")
    (tmp_path / "crt").write_bytes(pair.cert_chain_pems[0].bytes())
    (tmp_path / "key").write_bytes(pair.private_key_pem.bytes())
    user = {"client-certificate": "crt", "client-key": "key"}
    found = access.find(write(tmp_path / "config", user, pem(authority)), "")
    assert found.tls is not None
    assert await found.headers() == {}


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", "current-context: x\ncontexts: []", "current-context: x\ncontexts: 1"],
    ids=["empty", "a list", "not YAML", "no context", "wrong type"],
)
def test_an_invalid_kubeconfig_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config"
    path.write_text(content)
    with pytest.raises(InvalidKubeconfig, match="not valid"):
        access.find(path, "")


def test_a_missing_kubeconfig_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(InvalidKubeconfig, match="ATOLL_KUBERNETES__KUBECONFIG"):
        access.find(tmp_path / "missing", "")


async def test_the_service_account_of_a_pod_is_used(
    tmp_path: Path, authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"token": "t", "namespace": "atoll\n", "ca.crt": pem(authority)}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    found = access.from_service_account(tmp_path)
    assert (found.server, found.namespace) == ("https://[fd00::1]:443", "atoll")
    assert found.in_cluster
    assert await found.headers() == {"Authorization": "Bearer t"}
