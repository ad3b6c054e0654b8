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
"""What can be made again is neither stored with the workspace nor an artifact."""

NO_NETWORK = {
    # pip prints its index and gives up at once, because this is no address. `--no-index`, files
    # and an index that the user names work as ever.
    "PIP_INDEX_URL": "none: this sandbox has no network. Add packages from outside: "
    "session.install([...]), `atoll session install`, or dependencies=[...] of a new session.",
    "PIP_RETRIES": "0",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    # Debian's pip refuses to install anything for its interpreter, before it looks for packages.
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "UV_OFFLINE": "1",
    "npm_config_offline": "true",
}
"""Has installers say so at once instead of trying again for a while."""

INSTANCE = {**COMMON, "HOME": "/workspace", **CACHES, **NO_NETWORK}

INSTALLATION = {**COMMON, "HOME": "/tmp"}
"""Of the sandbox in which Atoll itself installs packages."""
