"""The configuration of an executor that is the first process of a container."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from atoll.drivers.shared.executor_bundle import SOCKET

USER_OOM_SCORE = 1000
"""When memory runs out, the kernel kills the process with the highest score."""
RLIMITS = {"CORE": 0, "MEMLOCK": 65_536, "MSGQUEUE": 819_200, "SIGPENDING": 4096}
"""Limits of the processes in every instance, soft and hard, by their names in `resource`."""


@dataclass(frozen=True)
class ExecutorConfig:
    """What an executor reads as one line of JSON from its standard input."""

    listen: str | int
    """Path of its socket, whose abstract name begins with a NUL; or a TCP port."""
    preload: tuple[str, ...]
    """Modules that the zygote imports."""
    packages: str
    """Path of the template's package environment, or empty."""
    ephemeral: bool
    """End with this connection to the standard input."""
    unattended: float | None
    """Seconds without a link after which it ends; null for never."""
    seccomp: dict[str, str]
    """Filter programs in hexadecimal, by the machine that `uname` reports."""
    token: str | None = None
    """What a control plane has to present; with `token_digest`, only its SHA-256 is known here."""
    token_digest: str | None = None
    peer: int | None = None
    """User of the processes in the container that may connect; null if none may."""
    journal: tuple[str, ...] = ()
    loopback: bool = False
    """Whether connections over TCP may come from its own machine or network namespace."""
    tls: bool = False
    """Whether it asks for a private key, and speaks TLS on its connections."""
    termination_grace: float = 0.0
    """Seconds between SIGTERM and its end, for a last checkpoint."""
    hooks: bool = True
    """Run start-up code of packages (`.pth` files and `sitecustomize`)."""
    rlimits: dict[str, int] = field(default_factory=dict)
    """Limits that the executor sets for itself and all processes, where the engine sets none."""
    inside: str = SOCKET
    oom_score: int = field(default=USER_OOM_SCORE)

    def line(self) -> bytes:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps({"peer": None, **given}).encode() + b"\n"
