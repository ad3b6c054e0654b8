"""Certificates and kubeconfigs of one cluster."""

from __future__ import annotations

import base64
import json
import ssl
from pathlib import Path
from typing import Any, NamedTuple

import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

FRONT_PROXY = "front-proxy-client"


class Pair(NamedTuple):
    certificate: Path
    key: Path


class Authority:
    """Issues what a cluster needs, in `directory`, for an API server at `url`."""

    def __init__(self, directory: Path, url: str) -> None:
        directory.mkdir()
        self._directory = directory
        self._url = url
        self._ca = trustme.CA()
        self.ca = directory / "ca.crt"
        self._ca.cert_pem.write_to_path(self.ca)

    def pair(self, name: str, *identities: str, subject: str, group: str | None = None) -> Pair:
        # Go rejects a certificate without any.
        identities = identities or (f"{name}.atoll.test",)
        issued = self._ca.issue_cert(*identities, common_name=subject, organization_name=group)
        pair = Pair(self._directory / f"{name}.crt", self._directory / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(pair.certificate)
        issued.private_key_pem.write_to_path(pair.key)
        return pair

    def service_account_key(self) -> Pair:
        """What signs the tokens of service accounts: a public and a private key."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pair = Pair(self._directory / "sa.pub", self._directory / "sa.key")
        pair.certificate.write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair

    def kubeconfig(self, name: str, *, subject: str, group: str | None = None) -> Path:
        """For a user with a certificate."""
        pair = self.pair(name, subject=subject, group=group)
        user = {
            "client-certificate-data": _encode(pair.certificate),
            "client-key-data": _encode(pair.key),
        }
        return self._write(name, user, "default")

    def token_kubeconfig(self, name: str, token: str, namespace: str) -> Path:
        return self._write(name, {"token": token}, namespace)

    def context(self, pair: Pair) -> ssl.SSLContext:
        """For a client with a certificate."""
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_cert_chain(pair.certificate, pair.key)
        return context

    def _write(self, name: str, user: dict[str, Any], namespace: str) -> Path:
        cluster = {"server": self._url, "certificate-authority-data": _encode(self.ca)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [
                {
                    "name": "test",
                    "context": {"cluster": "test", "user": name, "namespace": namespace},
                }
            ],
            "current-context": "test",
        }
        path = self._directory / f"{name}.kubeconfig"
        # JSON is YAML.
        path.write_text(json.dumps(content, indent=1))
        path.chmod(0o600)
        return path


def _encode(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
