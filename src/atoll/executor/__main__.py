"""
Starts the executor as PID 1 of its instance.

The configuration is a JSON object: the only argument, or, if that is `-`, the first line of the
standard input. Drivers use standard input for values that must not appear on a command line.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import os
import sys

from ..protocol import minijson
from . import bundle_import, syscalls
from .interpreter import zygote
from .listener import open_listener
from .supervisor import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_CONFIG = 1 << 20
CONFIG_TIMEOUT = 600
"""Seconds after which an executor ends whose control plane was killed while it started it."""
CLUSTER_VARIABLES = "KUBERNETES_"
"""Prefix of variables that describe the cluster: a kubelet sets them in every container."""
JOURNAL_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def main() -> None:
    text = sys.argv[1].encode()
    config = _read_config() if text == b"-" else minijson.loads(text)
    for name in [name for name in os.environ if name.startswith(CLUSTER_VARIABLES)]:
        del os.environ[name]
    if config.get("rlimits"):
        _limit_processes(config["rlimits"])
    program = config.get("seccomp", {}).get(os.uname().machine)
    if program:
        syscalls.install_filter(bytes.fromhex(program))
    prepare(bool(config.get("hooks", True)))
    serve(config)


def _limit_processes(limits: dict[str, int]) -> None:
    import resource  # Most executors are started with their limits.

    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(kind, (bound, bound))
        except (OSError, ValueError):
            pass  # gVisor refuses MSGQUEUE and SIGPENDING, which its kernel does not have.


def prepare(hooks: bool) -> None:
    """Turn this interpreter into one that can run user code."""
    bundle_import.remove()  # User code gets the usual importers.
    zygote.warm(hooks)


def serve(config: dict[str, Any]) -> None:
    """Be the executor of this instance."""
    # The kernel drops signals for which PID 1 has no handler, but Python installs one for SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    syscalls.set_dumpable(False)
    syscalls.set_name("atoll")
    if "journal" in config:
        config["journal_fds"] = [os.open(path, JOURNAL_FLAGS, 0o600) for path in config["journal"]]
    listener = open_listener(config)
    private = [listener.fileno(), *config.get("journal_fds", ())]
    if config.get("callback"):
        private.append(config["callback"]["fd"])
    if "key_fd" in config:
        private.append(config["key_fd"])
    for fd in private:
        os.set_inheritable(fd, False)
    Supervisor(config).run(listener)


def _read_config() -> dict[str, Any]:
    """
    Read the configuration from the standard input, then close the inherited standard streams, so
    that no child has them. Only stderr stays open, for the log.
    """
    import select  # Only executors that wait for their configuration.

    text = b""
    while not text.endswith(b"\n") and len(text) < MAX_CONFIG:
        if not select.select([0], [], [], CONFIG_TIMEOUT)[0]:
            sys.exit("The control plane that started this executor does not configure it.")
        piece = os.read(0, 65_536)
        if not piece:
            raise ValueError("the standard input has no configuration")
        text += piece
    config: dict[str, Any] = minijson.loads(text)
    if config.get("ephemeral"):
        config["owner_fd"] = os.dup(0)
    config["ready_fd"] = os.dup(1)
    if config.get("tls"):
        config["key_fd"] = os.dup(0)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)
    return config


if __name__ == "__main__":
    main()
