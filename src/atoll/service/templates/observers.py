"""Notifies parts of this replica that templates have changed."""

from __future__ import annotations

from typing import Protocol


class TemplateObserver(Protocol):
    def templates_changed(self) -> None:
        """
        A template was created, changed, built or removed, on any replica. The call must neither
        block nor raise.
        """
