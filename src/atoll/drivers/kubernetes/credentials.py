"""
What an executor and the control plane recognise each other by: the token and the certificate of an
instance.

The token is derived from the secret that all replicas share, and the pod knows only its digest. The
private key is made for one instance and sent to its executor over the API server; the certificate's
fingerprint is an annotation of the pod. So no object in the cluster contains a secret of Atoll.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

LIFETIME = timedelta(days=3650)
"""The control plane compares the fingerprint and not the time."""


@dataclass(frozen=True)
class KeyPair:
    pem: bytes = field(repr=False)
    """Private key and certificate, with an empty line at the end."""
    fingerprint: str
    """SHA-256 of the certificate, in hexadecimal."""


def token(secret: str, instance_id: str) -> str:
    text = f"kubernetes executor {instance_id}"
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


def make_key_pair(instance_id: str) -> KeyPair:
    # Imported here: it takes 50 ms.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, instance_id)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + LIFETIME)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(
        encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = private + certificate.public_bytes(encoding) + b"\n"
    der = certificate.public_bytes(serialization.Encoding.DER)
    return KeyPair(pem, fingerprint(der))


def client_context() -> ssl.SSLContext:
    """For connections to executors: the caller compares the fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
