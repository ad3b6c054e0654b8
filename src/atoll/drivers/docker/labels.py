"""
Labels of the containers, volumes and images that Atoll makes on an engine.

The engine stores them, so new names and values must be compatible with existing ones.
"""

from __future__ import annotations

from enum import StrEnum


class Label(StrEnum):
    NODE = "atoll.node"
    """Which node it belongs to: several may use one engine."""
    INSTANCE = "atoll.instance"
    WORKSPACE = "atoll.workspace"
    LINK = "atoll.link"
    """How the executor is reached: a `LinkKind`."""
    UID = "atoll.uid"
    """The user that owns the workspace and runs user code."""
    DISK = "atoll.disk"
    """What limits the size of the workspace: a `DiskLimit`."""
    SIZE = "atoll.size"
    """Size of a workspace volume in bytes."""
    INSTALL = "atoll.install"
    """A container in which packages are installed."""
    SCRATCH = "atoll.draft"
    """A container that is never started (`scratch_containers`)."""
    SHARED = "atoll.shared"
    """A volume with files of Atoll that all containers of the node mount."""
    PROBE = "atoll.probe"
    """
    With the node: a container that is created to look into its image. Not `NODE`: instances are
    found by that, and containers inherit the labels of their image.
    """
    BUILT_BY = "atoll.built-by"
    """With the node: an image that was built from a template's Dockerfile."""


class LinkKind(StrEnum):
    SOCKET = "socket"
    """A unix socket in a directory that the container shares with this machine."""
    RELAY = "relay"
    """A relay process that the engine starts in the container."""


class DiskLimit(StrEnum):
    FILE_SYSTEM = "held"
    """The workspace is a file system of its size."""
    EXECUTOR = "watched"
    """The executor measures the workspace and ends what outgrows it."""
