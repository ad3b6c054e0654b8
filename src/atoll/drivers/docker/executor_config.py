"""Configuration that an executor reads as one line of JSON from its standard input."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from atoll.drivers.docker.container_config import USER_OOM_SCORE
from atoll.drivers.shared.executor_bundle import SOCKET


@dataclass(frozen=True)
class ExecutorConfig:
    token: str
    listen: str
    """Path of its socket; the name of an abstract socket begins with a NUL."""
    peer: int | None
    """User of the processes in the container that may connect; null if none may."""
    journal: tuple[str, ...]
    preload: tuple[str, ...]
    """Modules that the zygote imports."""
    packages: str
    """Path of the template's package environment, or empty."""
    ephemeral: bool
    """End with this connection to the standard input."""
    unattended: float | None
    """Seconds without a link after which it ends; null for never."""
    seccomp: str
    """Filter program in hexadecimal; empty for none."""
    hooks: bool = True
    """Run start-up code of packages (`.pth` files and `sitecustomize`)."""
    inside: str = SOCKET
    oom_score: int = USER_OOM_SCORE

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"
