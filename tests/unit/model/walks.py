"""Random walks through a table of moves."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

S = TypeVar("S", bound=StrEnum)


def walks(
    moves: Mapping[S, frozenset[S]], start: S, *, most: int = 30
) -> st.SearchStrategy[list[S]]:
    """From `start`, one transition after the other, until none is left or `most` were made."""

    @st.composite
    def walk(draw: Callable[[st.SearchStrategy[S]], S]) -> list[S]:
        steps = [start]
        while len(steps) <= most and moves[steps[-1]]:
            steps.append(draw(st.sampled_from(sorted(moves[steps[-1]]))))
        return steps

    return walk()


def reachable(moves: Mapping[S, frozenset[S]], start: S) -> set[S]:
    found, pending = {start}, [start]
    while pending:
        for following in moves[pending.pop()] - found:
            found.add(following)
            pending.append(following)
    return found
