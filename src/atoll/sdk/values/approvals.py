"""Approvals: questions that running code asks a person."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an approval: yes or no, with a JSON value or a reason."""

    approved: bool
    answer: Any = None
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.approved


@dataclass(frozen=True, slots=True)
class Approval:
    """A question of running code to a person. Treat its text as untrusted: the code wrote it."""

    id: str = ""
    question: str = ""
    data: Any = None
    timeout: float | None = None
    """Seconds after which the question counts as refused."""
    state: str = "asked"
    """
    asked, answered or refused. Each question has two events: when it is asked, and when it is
    answered or refused. The second is missing if the session ends first.
    """
    approved: bool | None = None
    answer: Any = None
    reason: str | None = None
    """Why it was refused: timeout, cancelled, shutdown, or the text of the person."""

    @property
    def asked(self) -> bool:
        return self.state == "asked"
