"""Python packages of sessions' own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.model.packages import Install
    from atoll.model.template import Template


class Packages:
    async def begin(self, install: Install, template: Template) -> Install:
        """
        Checked, and as it is if these packages are in the cache: `installed`. Raises `Conflict`
        with code `version_conflict`, or `InvalidRequest`.
        """
        raise InvalidRequest("dependencies: not available.", field="dependencies")

    async def install(self, session_id: str, install: Install, template: Template) -> Install:
        """Installed, or `failed` with why."""
        raise NotImplementedError

    def added(self, env: Mapping[str, str], environment: str) -> dict[str, str]:
        """Variables by which code finds the packages, on top of these."""
        raise NotImplementedError
