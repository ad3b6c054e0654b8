"""Where an instance finds what Atoll puts into it, the same with every driver."""

from __future__ import annotations

EXECUTOR = "/run/atoll/executor.pyz"
INSIDE = "/run/atoll/inside"
PACKAGES = "/opt/atoll/packages"
"""All package environments of the node: to be entered by who knows a name, not listed."""
