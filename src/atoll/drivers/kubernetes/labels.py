"""
Labels and annotations of the objects that Atoll makes in a cluster.

The cluster stores them, so new names and values must be compatible with existing ones. Everything
that belongs to a node of Atoll is found by `NODE` and `CLUSTER`.
"""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum

PREFIX = "atoll.dev"
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


class Label(StrEnum):
    CLUSTER = f"{PREFIX}/cluster"
    """The database of Atoll that the object belongs to."""
    NODE = f"{PREFIX}/node"
    """The node of Atoll: several may use one namespace."""
    INSTANCE = f"{PREFIX}/instance"
    TEMPLATE = f"{PREFIX}/template"
    SESSION = f"{PREFIX}/session"
    """Set when a session gets the instance; an instance of the warm pool has none."""
    WORKSPACE = f"{PREFIX}/workspace"
    """A persistent volume claim with the files of a session."""
    IMAGE = f"{PREFIX}/image"
    """Describes an image: the name of its layer."""
    PROBE = f"{PREFIX}/probe"
    """A pod that finds something out and is removed: an image's interpreter, or the network."""
    OPEN = f"{PREFIX}/open"
    """A pod of a probe that the network policy does not select."""
    SHARED = f"{PREFIX}/shared"
    """Files of Atoll that all instances of the node mount."""


class Annotation(StrEnum):
    WORKSPACE = f"{PREFIX}/workspace"
    CERTIFICATE = f"{PREFIX}/certificate"
    """SHA-256 of the certificate that the executor presents."""
    UID = f"{PREFIX}/uid"
    """The owner of the files in a claim."""
    EXECUTOR = f"{PREFIX}/executor"
    """The config map with the executor that it mounts."""
    MOUNTED = f"{PREFIX}/mounted"
    """The directory of the bucket that is mounted as the workspace, if one is."""
    VOLUMES = f"{PREFIX}/volumes"
    """Names of its volumes, separated by commas."""
    DISK = f"{PREFIX}/disk"
    """Bytes that the workspace may have."""


def value(text: str) -> str:
    """The text as the value of a label, or a digest of it if it cannot be one."""
    if _LABEL_VALUE.fullmatch(text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def node_digest(labels: dict[str, str]) -> str:
    """Tells the objects of two nodes or databases in one namespace apart."""
    return hashlib.sha256(f"{labels[Label.CLUSTER]} {labels[Label.NODE]}".encode()).hexdigest()[:8]


def selector(labels: dict[str, str]) -> str:
    """As the query parameter `labelSelector`; an empty value means that the label exists."""
    return ",".join(f"{name}={text}" if text else name for name, text in labels.items())
