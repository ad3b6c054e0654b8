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

INSTANCE = {**COMMON, "HOME": "/workspace", **CACHES}

INSTALLATION = {**COMMON, "HOME": "/tmp"}
"""Of the sandbox in which Atoll itself installs packages."""
