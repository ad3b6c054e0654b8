"""Where an instance finds what Atoll puts into it, the same with every driver."""

from __future__ import annotations

EXECUTOR = "/run/atoll/executor.pyz"
INSIDE = "/run/atoll/inside"
PACKAGES = "/opt/atoll/packages"
"""
All package environments of the node. An environment can be entered by name; the directory cannot be
listed.
"""
