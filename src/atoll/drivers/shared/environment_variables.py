"""
Environment variables of a sandbox, the same with every driver.

What a template, a session or an execution sets overrides them.
"""

from __future__ import annotations

COMMON = {"USER": "sandbox", "LC_ALL": "C.UTF-8", "TERM": "dumb"}

CACHES = {
    "XDG_CACHE_HOME": "/tmp/.cache",
    # These programs ignore the first one, or write to more places.
    "MPLCONFIGDIR": "/tmp/.cache/matplotlib",
    "npm_config_cache": "/tmp/.cache/npm",
}
"""Caches are outside the workspace: they are neither stored with it nor artifacts."""

NO_NETWORK = {
    # pip prints this value and fails at once, because it is not a URL. `--no-index`, files and an
    # index that the user names keep working.
    "PIP_INDEX_URL": "none: this sandbox has no network. Add packages from outside: "
    "session.install([...]), `atoll session install`, or dependencies=[...] of a new session.",
    "PIP_RETRIES": "0",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    # Without it, Debian's pip refuses before it prints the message above.
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "UV_OFFLINE": "1",
    "npm_config_offline": "true",
}
"""Makes installers fail at once with an explanation instead of retrying."""

INSTANCE = {**COMMON, "HOME": "/workspace", **CACHES, **NO_NETWORK}

INSTALLATION = {**COMMON, "HOME": "/tmp"}
"""For the sandbox in which Atoll installs packages."""
