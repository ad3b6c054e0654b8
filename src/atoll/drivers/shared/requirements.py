"""Refuses templates that require what a node does not provide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    from atoll.model.instance import Capabilities
    from atoll.model.template import Template


def check_requirements(template: Template, capabilities: Capabilities) -> None:
    missing = [name for name in template.require if name in capabilities.missing]
    if missing:
        reasons = "; ".join(f"{name} ({capabilities.missing[name]})" for name in missing)
        raise InvalidRequest(
            f"Template {template.id} requires what this node does not provide: {reasons}. "
            "Run `atoll doctor` for details.",
            code="isolation_unavailable",
            missing=missing,
        )
