"""Questions of running code to a person, and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """What a person says to an approval: yes or no, and any JSON value or words with it."""

    approved: bool
    answer: Any = None
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.approved


@dataclass(frozen=True, slots=True)
class Approval:
    """A question of running code to a person; the code wrote it, so treat it as untrusted."""

    id: str = ""
    question: str = ""
    data: Any = None
    timeout: float | None = None
    """Seconds that the code waits in all; then it is refused."""
    state: str = "asked"
    """
    asked, answered or refused. Each question is told of when asked, and how it ended, unless its
    session was ended meanwhile.
    """
    approved: bool | None = None
    answer: Any = None
    reason: str | None = None
    """Of a refusal: timeout, cancelled, shutdown, or the person's words."""

    @property
    def asked(self) -> bool:
        return self.state == "asked"
